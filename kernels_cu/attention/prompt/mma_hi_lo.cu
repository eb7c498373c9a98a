// Attention of hi/lo matrices by mma.sync of fp16 (sm_75 and newer), for heads of 64 or 128 channels:
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]     j <= i with ATT_CAUSAL, else all rows
//
//   attention_fp32_mma: float32 accuracy on tensor cores: each float32 matrix as two float16 matrices, three products
//       instead of one
//
// A number is x = (hi + lo / 2048) scale[row], where scale is a power of two (lib/hi_lo.cuh). A product is computed
// as hi hi + (hi lo + lo hi) / 2048, with the sum of hi lo and lo hi in a separate accumulator.
//
//   parts (2, rows, W)       hi, then lo; rows [Q | K | V] as in attention/prompt/mma.cu
//   scale (rows)             one scale for Q, K and V of a row
//   out_parts (2, rows, C)   the rows of all sequences, one sequence after the other: lib/attention/mma_work.cuh
//   out_scale (rows)         the largest scale of the rows that row i sees, which bounds their weighted average
//
// A warp has 16 queries. The head of attention/prompt/mma.cu applies to this file as well, with these differences:
//
//   keys      two warps share 16 queries: each processes one half of every tile of keys. The last queries of a
//             sequence, which see the most keys, then take half as long. At the end the second warp passes its sums
//             to the first
//   scores    the scales of query and key are applied separately: (hi hi + ...) scale[j], then scale[i] UNIT in the
//             argument of exp2
//   weights   P[i, j] scale[j] / top[i], which is at most P, is converted to two parts for the second product. top[i]
//             is the largest scale of a key so far, and O is stored divided by top[i]. The denominator is the sum of P
//             without scales
//   one scale with ATT_ONE_SCALE, all rows have the same scale. The kernel computes the same bits with fewer registers.
//             With a causal mask, a multiprocessor therefore holds two blocks
//   sums      tensor cores truncate their sums. Therefore the product of each tile is added to O in float32
//
// If hi is infinite or NaN, lo is 0. Every result that depends on such a value is infinite or NaN, but not always the
// same as in float32: infinity can become NaN.
//
// Block (THREADS), grid ceil(seq_len / QUERIES) n_head B, dynamic shared memory: ATT_STAGES STAGE bytes, then the
// queries in 2 QUERIES PITCH bytes. Arrays are aligned to 16 bytes. The lo parts are then also aligned, because C is a
// multiple of 64.
#define STORAGE_FP16 1
#include "lib/common.cuh"
#include "lib/fast.cuh"
#include "lib/overlap.cuh"
#include "lib/hi_lo.cuh"
#include "lib/attention/mma_work.cuh"
#include "lib/sm80.cuh"

#ifndef ATT_WARPS  // warps for each half of the keys
#define ATT_WARPS 4
#endif
#ifndef ATT_STAGES
#define ATT_STAGES 3
#endif
#ifndef ATT_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define ATT_BLOCKS 1
#endif

constexpr int HALF = 32 * ATT_WARPS, THREADS = 2 * HALF, QUERIES = 16 * ATT_WARPS;
#include "lib/attention/mma_tile.cuh"
#include "lib/attention/hi_lo_rows.cuh"
#include "attention/prompt/mma_not_finite.cuh"
constexpr int STAGE = 4 * TILE, OWN = KEYS / 2;  // STAGE: bytes of K hi, K lo, V hi, V lo; OWN: keys of a tile per warp
static_assert(ATT_STAGES >= 2 && QUERIES > 0, "one tile travels while another is multiplied");
static_assert(4 * (SUMS + 6) * HALF <= ATT_STAGES * STAGE, "the sums of half of the warps fit in the ring");

// A warp's 16 queries.
struct Queries : Rows {
#if ATT_BLOCKS > 1 || ATT_SIZE > 64 || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000)
    static constexpr bool ALL_MASKED = true;  // all tiles use the masked code: the unmasked code exceeds the registers
#else
    static constexpr bool ALL_MASKED = false;
#endif

    // Returns whether none of the warp's queries sees any of the HELD keys from key 8 n on.
    template <bool MASKED, int HELD>
    static __device__ __forceinline__ bool hidden(int n, int last) {
        return MASKED && (8 * n > (ATT_CAUSAL ? last + 15 : last) || is_past(8 * n + HELD - 1, last));
    }

    // Processes the warp's keys of a tile, of which only the first `there` keys exist. With MASKED, not all queries see
    // all of these keys. If causal, row i of the warp sees keys 0 .. last + i, or only the last WINDOW of these;
    // otherwise all rows see keys 0 .. last. `rows`: the high parts of the queries; the low parts follow after QUERIES
    // rows.
    template <bool MASKED>
    __device__ __forceinline__ void take(const char* rows, const char* stage, const float* scale, int there, int last) {
        float of_key[OWN / 8][2], s[OWN / 8][4], cross[OWN / 8][4];
        load_scales(of_key, scale, MASKED ? there : OWN);
        multiply_keys<MASKED>(s, cross, rows, stage, last);
        unsigned p[OWN / 16][4], q[OWN / 16][4];  // p: hi of P; q: lo of P
        soften<MASKED>(s[0], cross[0], of_key, p, q, last);
        multiply_values<MASKED>(p, q, stage + 2 * TILE, last);
    }

    // Computes products of queries and keys: s: hi hi; cross: hi lo + lo hi.
    template <bool MASKED>
    static __device__ __forceinline__ void multiply_keys(float (&s)[OWN / 8][4], float (&cross)[OWN / 8][4],
                                                         const char* rows, const char* keys, int last) {
        const int lane = threadIdx.x % 32;
        rows += lane % 16 * PITCH + lane / 16 * 16;
        keys += lane % 8 * PITCH + lane / 8 % 2 * 16 + lane / 16 * TILE;  // lanes 16 to 31 load lo of K
#pragma unroll
        for (int i = 0; i < OWN / 2; ++i) s[i / 4][i % 4] = cross[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < SIZE / 16; ++k) {
            unsigned hi[4], lo[4];
            load_matrices<false>(hi[0], hi[1], hi[2], hi[3], rows + 32 * k);
            load_matrices<false>(lo[0], lo[1], lo[2], lo[3], rows + QUERIES * PITCH + 32 * k);
#pragma unroll
            for (int n = 0; n < OWN / 8; ++n) {
                if (hidden<MASKED, 8>(n, last)) continue;
                unsigned b[2], c[2];
                load_matrices<false>(b[0], b[1], c[0], c[1], keys + 8 * n * PITCH + 32 * k);
                mma(s[n], hi, b);
                mma(cross[n], hi, c);
                mma(cross[n], lo, b);
            }
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void multiply_values(const unsigned (&p)[OWN / 16][4], const unsigned (&q)[OWN / 16][4],
                                                    const char* values, int last) {
        const int lane = threadIdx.x % 32;
        values += lane % 16 * PITCH + lane / 16 * TILE;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            float sums[4] = {}, cross[4] = {};
#pragma unroll
            for (int k = 0; k < OWN / 16; ++k) {  // one step per 16 keys
                if (hidden<MASKED, 16>(2 * k, last)) continue;
                unsigned b[2], c[2];
                load_matrices<true>(b[0], b[1], c[0], c[1], values + 16 * k * PITCH + 16 * n);
                const bool in_part = 16 * k == last || is_past(16 * k, last + 15);
                if (MASKED && ATT_CAUSAL && in_part) take_apart(out[n], p[k], b, c, WINDOW ? last - 16 * k : 0);
                mma(sums, p[k], b);
                mma(cross, p[k], c);
                mma(cross, q[k], b);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) out[n][e] += fmaf(cross[e], CROSS, sums[e]);
        }
    }

    // Handles infinite and NaN values of 16 keys, of which query i sees keys 0 .. ahead + i, or only the last WINDOW of
    // these. Sets infinite and NaN values of b (hi of V) and c (lo of V) to 0, and adds their products with P, key by
    // key, to `out` of the queries that see the key.
    static __device__ __forceinline__ void take_apart(float (&out)[4], const unsigned (&p)[4], unsigned (&b)[2],
                                                      unsigned (&c)[2], int ahead) {
        const unsigned found = not_finite(b[0]) | not_finite(b[1]) | not_finite(c[0]) | not_finite(c[1]);
        if (!__any_sync(0xffffffffu, found != 0)) return;
        const unsigned finite[2] = {finite_of(b[0]), finite_of(b[1])};
        const unsigned wild[1][2] = {{b[0] ^ finite[0], b[1] ^ finite[1]}};
        b[0] = finite[0], b[1] = finite[1];
        c[0] = finite_of(c[0]), c[1] = finite_of(c[1]);
        add_by_key(&out, p, wild, ahead);
    }
};

// Launched by operation (variant): attention (mma_fp32), attention_varlen (mma_fp32)
extern "C" __global__ void __launch_bounds__(THREADS, ATT_BLOCKS) attention_fp32_mma(
    const T* parts,         // (2, rows, W)
    const float* scale,     // (rows), powers of two from 2^-126 to 2^126
    const int* cu_seqlens,  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out_parts,           // (2, rows, C)
    float* out_scale,       // (rows)
    long long rows, int B,
    int seq_len,            // length of the longest sequence
    int n_head,
    int together) {         // heads whose blocks run at the same time
    extern __shared__ __align__(16) char ring[];
    let_next_start();
    wait_for_previous();
    const Job job = choose_job(cu_seqlens, B, seq_len, n_head, together, QUERIES);
    if (job.first >= job.length) return;
    const int C = SIZE * n_head, KV = C / ATT_SERVES, left = job.length - job.first;
    const int keys = ATT_CAUSAL ? min(job.length, job.first + QUERIES) : job.length;  // visible keys: 0 .. keys - 1
    const long long stride = C + 2LL * KV, part = rows * stride;
    const T* head = parts + job.row * stride + SIZE * job.head;
    scale += job.row;
    char* const asking = ring + ATT_STAGES * STAGE;  // address of the queries
    for (int i = 0; i < 2; ++i) {
        copy_rows<QUERIES>(asking + i * QUERIES * PITCH, head + i * part + job.first * stride, stride, left);
    }
    const int to_keys = C - SIZE * (job.head - job.head / ATT_SERVES);  // offset from Q of this head to its K, in a row
    const int first_key = first_seen(job.first) / KEYS * KEYS;
    int arriving = first_key;  // first key of the next tile to be copied
    const auto ask = [&](char* stage) {
        if (arriving < keys) {
            const T* from = head + arriving * stride + to_keys;
#pragma unroll 1  // an unrolled loop would hold 16 addresses, in too many registers
            for (int i = 0; i < 4; ++i) {
                copy_rows<KEYS>(stage + i * TILE, from + i % 2 * part + i / 2 * KV, stride, job.length - arriving);
            }
        }
        end_group();
        arriving += KEYS;
    };
#pragma unroll 1
    for (int i = 0; i < ATT_STAGES - 1; ++i) ask(ring + i * STAGE);

    const int warp = threadIdx.x % HALF / 32 * 16;      // the warp's first query in the block's tile
    const int own = __shfl_sync(0xffffffffu, threadIdx.x / HALF, 0) * OWN;  // the warp's first key in a tile
    const int first = job.first + warp;
    Queries queries;
    queries.clear(first < job.length ? scale + first : scale, job.length - first);
    int stage = 0, empty = (ATT_STAGES - 1) * STAGE;
#pragma unroll 1
    for (int key = first_key; key < keys; key += KEYS) {
        wait_for_groups<ATT_STAGES - 2>();
        __syncthreads();  // the tile and the queries are complete; no thread still reads the previous tile
        ask(ring + empty);
        const char *const asked = asking + warp * PITCH, *const tile = ring + stage + own * PITCH;
        const int from = key + own, last = (ATT_CAUSAL ? first : job.length - 1) - from;
        if (first < job.length && last >= 0 && !is_past(OWN - 1, last)) {
            if (last >= OWN - 1 && !is_past(0, last + 15) && !Queries::ALL_MASKED) {
                queries.take<false>(asked, tile, scale + from, job.length - from, last);
            } else {
                queries.take<true>(asked, tile, scale + from, job.length - from, last);
            }
        }
        empty = stage;
        stage = stage == (ATT_STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }
    __syncthreads();  // no thread still reads the ring
    float* const passed = reinterpret_cast<float*>(ring) + threadIdx.x % HALF;
    if (own > 0) queries.give<HALF>(passed);
    __syncthreads();
    if (own > 0) return;
    queries.add_given<HALF>(passed);
    const long long row = job.row + first;
    float* top = job.head == 0 ? out_scale + row : nullptr;
    queries.store_scales(top, __ldcg(scale), job.length - first);
    queries.store(out_parts + row * C + SIZE * job.head, rows * C, C, job.length - first);
}
