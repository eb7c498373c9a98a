// Attention with the accuracy of float32 on tensor cores (mma.sync of fp16; sm_80 and newer), for heads of 64 channels:
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / 8) v[j]      j <= i with ATT_CAUSAL, else all of the sequence
//
// Matrices have two parts (lib/two_part.cuh): x = (hi + lo / 2048) scale[row], where scale is a power of two. A product
// becomes three: hi hi + (hi lo + lo hi) / 2048, the last two in a separate accumulator.
//
//   parts (2, rows, 3C)      hi, then lo; a row is [Q | K | V], C = 64 n_head; scale (rows) applies to all three
//   out_parts (2, rows, C)   the rows of all sequences, one sequence after the other: attention/mma_job.cuh
//   out_scale (rows)         the largest scale of the rows that row i sees, which bounds their weighted average
//
// A warp has 16 queries. The notes of attention/mma.cu apply here too, with these differences:
//
//   scores    the scales of query and key are applied separately: (hi hi + ...) scale[j], then scale[i] UNIT in the
//             argument of exp2
//   weights   P[i, j] scale[j] / top[i], which is at most P, is converted to two parts for the second product. top[i]
//             is the largest scale so far, and O is in its units. The denominator sums P alone
//   sums      tensor cores truncate their sums: the product of each tile is added to O by a float32 addition
//
// If hi is not finite, lo is 0. Such a value makes every result that it reaches not finite, but not always the same as
// in float32: infinity can become NaN.
//
// Block (THREADS), grid ceil(seq_len / QUERIES) n_head B, dynamic shared memory ATT_STAGES STAGE bytes. Arrays are
// aligned to 16 bytes; the second parts are then aligned too, as C is a multiple of 64.
#if !defined(STORAGE_FP16)
#define STORAGE_FP16
#endif
#include "lib/common.cuh"
#include "lib/fast.cuh"
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "attention/mma_job.cuh"
#include "lib/sm80.cuh"

#ifndef ATT_CAUSAL
#define ATT_CAUSAL 1
#endif
#ifndef ATT_WARPS
#define ATT_WARPS 4
#endif
#ifndef ATT_STAGES
#define ATT_STAGES 3
#endif
#ifndef ATT_BLOCKS  // that an SM must be able to hold
#define ATT_BLOCKS 2
#endif

constexpr int THREADS = 32 * ATT_WARPS, QUERIES = 16 * ATT_WARPS;
#include "attention/mma_tile.cuh"
constexpr int STAGE = 4 * TILE;  // K hi, K lo, V hi, V lo
static_assert(2 * QUERIES * PITCH <= STAGE, "queries arrive in one stage of the ring");
static_assert(ATT_STAGES >= 2, "one tile travels while another is multiplied");

// Two floats, each as hi + lo / 2048.
struct Split {
    unsigned hi, lo;

    __device__ __forceinline__ Split(float a, float b) {
        float near[2];
        hi = pack2(a, b);
        Vec<T, 2>{hi}.unpack(near);
        lo = pack2((a - near[0]) * 2048.0f, (b - near[1]) * 2048.0f);
    }
};

// A warp's state for its queries. Lane 4 g + t has rows g and g + 8.
struct Queries {
    static constexpr float CROSS = 1.0f / 2048;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    static constexpr bool ALL_MASKED = true;  // there the compiler fits only one of the two variants into registers
#else
    static constexpr bool ALL_MASKED = false;
#endif
    unsigned hi[4][4], lo[4][4];
    float out[8][4];
    float unit[2];                       // the row's scale, in units of exp2's argument
    float sum[2], reference[2], top[2];  // the sum covers this lane's keys; top: the largest scale so far

    __device__ __forceinline__ Queries(const float* scale, int left) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unit[r] = 8 * r + g < left ? __ldcg(scale + 8 * r + g) * UNIT : 0.0f;
            sum[r] = top[r] = 0.0f;
            reference[r] = -INFINITY;
        }
    }

    __device__ __forceinline__ void load(const char* rows) {
        const int lane = threadIdx.x % 32;
        rows += lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            load_matrices<false>(hi[k][0], hi[k][1], hi[k][2], hi[k][3], rows + 32 * k);
            load_matrices<false>(lo[k][0], lo[k][1], lo[k][2], lo[k][3], rows + QUERIES * PITCH + 32 * k);
        }
    }

    static __device__ __forceinline__ float inverse(float power) {  // of a power of two
        return __int_as_float(0x7f000000 - __float_as_int(power));
    }

    template <bool MASKED>
    static __device__ __forceinline__ bool hidden(int n, int seen) {
        return MASKED && 8 * n > (ATT_CAUSAL ? seen + 15 : seen);
    }

    // Processes a tile of keys, of which `there` exist. With MASKED, not all queries see all keys: if causal, row i of
    // the warp sees keys 0 .. seen + i of the tile; else all rows see 0 .. seen.
    template <bool MASKED>
    __device__ __forceinline__ void take(const char* stage, const float* scale, int there, int seen) {
        const int lane = threadIdx.x % 32, t = lane % 4;
        const int sees = seen + (ATT_CAUSAL ? lane / 4 : 0) - 2 * t;  // of key 2 t, row g
        float of_key[8][2], s[8][4];
        multiply_keys<MASKED>(s, stage, seen);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int key = 8 * n + 2 * t + e;
                of_key[n][e] = __ldcg(scale + (MASKED ? min(key, there - 1) : key));
            }
        }
        float largest[2] = {-INFINITY, -INFINITY}, highest[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool visible = !MASKED || 8 * n + e % 2 - (ATT_CAUSAL ? 8 * (e / 2) : 0) <= sees;
                s[n][e] = visible ? s[n][e] * of_key[n][e % 2] : -INFINITY;
                largest[e / 2] = fmaxf(largest[e / 2], s[n][e]);
                highest[e / 2] = fmaxf(highest[e / 2], visible ? of_key[n][e % 2] : 0.0f);
            }
        }
        float base[2], factor[2], shrink[2], down[2];
        bool moves = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float old = reference[r], next = fmaf(lanes_max<4>(largest[r]), unit[r], -BELOW);
            const float higher = lanes_max<4>(highest[r]);
            const bool passes = next > old + (AT_MOST - BELOW);
            factor[r] = passes ? exp2_fast(old - next) : 1.0f;
            reference[r] = passes ? next : old;
            base[r] = reference[r] == -INFINITY ? 0.0f : -reference[r];
            down[r] = inverse(higher);
            shrink[r] = top[r] * down[r];  // 1 in most cases
            moves |= passes || higher > top[r];
            top[r] = higher;
        }
        if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[r] *= factor[r];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2] * shrink[e / 2];
            }
        }
        unsigned p[4][4], q[4][4];  // hi and lo
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // i % 2: the row; i / 2: the half of the 16 keys
                const int n = 2 * k + i / 2, r = i % 2;
                const float a = exp2_fast(fmaf(s[n][2 * r], unit[r], base[r]));
                const float b = exp2_fast(fmaf(s[n][2 * r + 1], unit[r], base[r]));
                sum[r] += a;
                sum[r] += b;
                const Split both(a * (of_key[n][0] * down[r]), b * (of_key[n][1] * down[r]));
                p[k][i] = both.hi;
                q[k][i] = both.lo;
            }
        }
        multiply_values<MASKED>(p, q, stage + 2 * TILE, seen);
    }

    template <bool MASKED>
    __device__ __forceinline__ void multiply_keys(float (&s)[8][4], const char* keys, int seen) const {
        const int lane = threadIdx.x % 32;
        keys += (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            float cross[2][4] = {};
#pragma unroll
            for (int i = 0; i < 2; ++i) s[n + i][0] = s[n + i][1] = s[n + i][2] = s[n + i][3] = 0.0f;
            if (hidden<MASKED>(n, seen)) continue;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                unsigned b[2][2], c[2][2];
                load_matrices<false>(b[0][0], b[0][1], b[1][0], b[1][1], keys + 8 * n * PITCH + 32 * k);
                load_matrices<false>(c[0][0], c[0][1], c[1][0], c[1][1], keys + TILE + 8 * n * PITCH + 32 * k);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(s[n + i], hi[k], b[i]);
                    mma(cross[i], hi[k], c[i]);
                    mma(cross[i], lo[k], b[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n + i][e] = fmaf(cross[i][e], CROSS, s[n + i][e]);
            }
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void multiply_values(const unsigned (&p)[4][4], const unsigned (&q)[4][4],
                                                    const char* values, int seen) {
        const int lane = threadIdx.x % 32;
        values += lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            float sums[2][4] = {}, cross[2][4] = {};
#pragma unroll
            for (int k = 0; k < 4; ++k) {  // 16 keys
                if (hidden<MASKED>(2 * k, seen)) continue;
                unsigned b[2][2], c[2][2];
                load_matrices<true>(b[0][0], b[0][1], b[1][0], b[1][1], values + 16 * k * PITCH + 16 * n);
                load_matrices<true>(c[0][0], c[0][1], c[1][0], c[1][1], values + TILE + 16 * k * PITCH + 16 * n);
                if (MASKED && ATT_CAUSAL && 16 * k == seen) take_apart(out + n, p[k], b, c);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma(sums[i], p[k], b[i]);
                    mma(cross[i], p[k], c[i]);
                    mma(cross[i], q[k], b[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[n + i][e] += fmaf(cross[i][e], CROSS, sums[i][e]);
            }
        }
    }

    // For 16 keys of which query i sees 0 .. i: removes values that are not finite from b and c, and adds them, key by
    // key, to the queries that see them.
    static __device__ __forceinline__ void take_apart(float (*out)[4], const unsigned (&p)[4], unsigned (&b)[2][2],
                                                      unsigned (&c)[2][2]) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            found |= not_finite(b[i][0]) | not_finite(b[i][1]) | not_finite(c[i][0]) | not_finite(c[i][1]);
        }
        if (!__any_sync(0xffffffffu, found != 0)) return;
        unsigned wild[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                wild[i][j] = b[i][j] & (not_finite(b[i][j]) >> 15) * 0xffffu;
                b[i][j] ^= wild[i][j];
                c[i][j] &= ~((not_finite(c[i][j]) >> 15) * 0xffffu);
            }
        }
#pragma unroll 1
        for (int key = 0; key < 16; ++key) {
            const unsigned pair = key / 2 % 4 == t ? (key % 2 ? 0xffff0000u : 0xffffu) : 0u;
            const unsigned first = key < 8 ? pair : 0u, second = key < 8 ? 0u : pair;
            const unsigned a[4] = {p[0] & first, p[1] & first, p[2] & second, p[3] & second};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned of_key[2] = {wild[i][0] & first, wild[i][1] & second};
                float then[4] = {out[i][0], out[i][1], out[i][2], out[i][3]};
                mma(then, a, of_key);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (g + 8 * (e / 2) >= key && !is_finite(then[e])) out[i][e] = then[e];
                }
            }
        }
    }

    // Stores the warp's rows below `left` at `to`; lo is `part` elements further. `scale`: for the scales, or null.
    __device__ __forceinline__ void store(T* to, float* scale, long long part, long long stride, int left) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float factor = 1.0f / lanes_sum<4>(sum[r]);
            const int row = 8 * r + g;
            if (scale && t == 0 && row < left) scale[row] = top[r];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned v[4], w[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float(&c)[4] = out[4 * half + n];
                    const Split both(c[2 * r] * factor, c[2 * r + 1] * factor);
                    v[n] = both.hi;
                    w[n] = both.lo;
                }
                turn(v, t);
                turn(w, t);
                T* at = to + row * stride + 32 * half + 8 * t;
                if (row < left) {
                    *reinterpret_cast<uint4*>(at) = {v[0], v[1], v[2], v[3]};
                    *reinterpret_cast<uint4*>(at + part) = {w[0], w[1], w[2], w[3]};
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, ATT_BLOCKS) attention_fp32_mma(
    const T* parts,         // (2, rows, 3C)
    const float* scale,     // (rows), powers of two from 2^-126 to 2^126
    const int* cu_seqlens,  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out_parts,           // (2, rows, C)
    float* out_scale,       // (rows)
    long long rows,
    int B,
    int seq_len,            // of the longest sequence
    int n_head,
    int together) {         // heads whose blocks run at the same time
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) char ring[];
    let_next_start();
    wait_for_previous();
    const Job job = choose_job(cu_seqlens, B, seq_len, n_head, together, QUERIES);
    if (job.first >= job.length) return;
    const int C = SIZE * n_head, left = job.length - job.first;
    const int keys = ATT_CAUSAL ? min(job.length, job.first + QUERIES) : job.length;  // that are seen, from key 0 on
    const long long stride = 3LL * C, part = rows * stride;
    const T* head = parts + job.row * stride + SIZE * job.head;
    scale += job.row;
    for (int i = 0; i < 2; ++i) {
        char* to = ring + (ATT_STAGES - 1) * STAGE + i * QUERIES * PITCH;
        copy_rows<QUERIES>(to, head + i * part + job.first * stride, stride, left);
    }
    int arriving = 0;  // the first key of the next tile to be copied
    const auto ask = [&](char* stage) {
        if (arriving < keys) {
            const T* from = head + arriving * stride + C;
#pragma unroll 1  // 16 addresses at a time would need too many registers
            for (int i = 0; i < 4; ++i) {
                copy_rows<KEYS>(stage + i * TILE, from + i % 2 * part + i / 2 * C, stride, job.length - arriving);
            }
        }
        end_group();
        arriving += KEYS;
    };
#pragma unroll 1
    for (int i = 0; i < ATT_STAGES - 1; ++i) ask(ring + i * STAGE);

    const int warp = threadIdx.x / 32 * 16;  // the warp's first query in the block's tile
    const int first = job.first + warp;
    Queries queries(scale + first, job.length - first);
    wait_for_groups<ATT_STAGES - 2>();
    __syncthreads();
    queries.load(ring + (ATT_STAGES - 1) * STAGE + warp * PITCH);
    char *stage = ring, *empty = ring + (ATT_STAGES - 1) * STAGE;
#pragma unroll 1
    for (int key = 0; key < keys; key += KEYS) {
        wait_for_groups<ATT_STAGES - 2>();
        __syncthreads();  // the tile is complete, and no thread still reads the previous one or the queries
        ask(empty);
        const int seen = (ATT_CAUSAL ? first : job.length - 1) - key;
        if (first < job.length && seen >= 0) {
            if (seen >= KEYS - 1 && !Queries::ALL_MASKED) {
                queries.take<false>(stage, scale + key, job.length - key, seen);
            } else {
                queries.take<true>(stage, scale + key, job.length - key, seen);
            }
        }
        empty = stage;
        stage = stage == ring + (ATT_STAGES - 1) * STAGE ? ring : stage + STAGE;
    }
    const long long row = job.row + first;
    float* top = job.head == 0 ? out_scale + row : nullptr;
    queries.store(out_parts + row * C + SIZE * job.head, top, rows * C, C, job.length - first);
#else
    asm("trap;");
#endif
}
