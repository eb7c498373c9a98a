// Attention on tensor cores (mma.sync; sm_75 and newer), for heads of 64, 128 or 256 channels:
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]     j <= i with ATT_CAUSAL, else all rows
//
//   qkv (rows, W)    a row is [Q | K | V], each with its heads next to each other: n_head heads of Q (C channels), and
//                    C / ATT_SERVES channels of K and of V; each head of K and V serves ATT_SERVES heads of Q
//   out (rows, C)    the rows of all sequences, one sequence after the other: lib/attention/mma_work.cuh
//
//   attention_mma: tensor cores (mma.sync), 16 or 32 queries per warp: scores stay in registers, cp.async copies tiles
//       of K and V into a ring in shared memory; ragged batches
//   attention_cached_mma: attention_mma with K and V from the cache, for packed rows in the cache's 16-bit dtype. The
//       kernel is compiled with ATT_CACHED. The cache already contains the keys and values of the rows. Row i of a
//       sequence is at position start + i and sees all keys up to this position
//
// A warp holds its 16 ATT_FRAGS queries in registers (with 256 channels in shared memory). It processes tiles of 64
// keys (with 256 channels 32 keys), which the block's warps share:
//
//   cp.async   [K V of tile j+1, j+2 ...]     ATT_STAGES tiles in shared memory; one barrier per tile
//   mma        S = Q K^T                      (queries, 64)
//   softmax    P = exp2(S UNIT - reference)   see lib/attention/scores.cuh; lanes add their sums of P at the end
//   mma        O = O + P V                    the accumulator of S has the layout of operand P of the next product
//
// The bits of a row depend only on its sequence: tiles are counted from the start of the sequence, and a warp always
// processes a whole tile. Keys are processed in steps of 16. A group of 16 queries skips a step if none of its queries
// sees any of the 16 keys. In a step in which only some of the queries see all 16 keys (one step per group, or two with
// a cache), infinite and NaN values of V are multiplied key by key, only for the queries that see the key. Infinite and
// NaN values are also multiplied key by key in steps at the start of a window (lib/attention/window.cuh). Keys after
// the end of a sequence are not read and count as zeros. With a cache, a query has the same bits as in attention_mma,
// for any start.
//
// Measured: docs/performance.md#attention, with a cache docs/experiments.md#attention_wgmma
//
// Source of the idea: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (2023).
//
// Block (THREADS), grid ceil(seq_len / QUERIES) n_head B, dynamic shared memory: ATT_STAGES STAGE bytes, and with 256
// channels the bytes of the queries. qkv and out are aligned to 16 bytes.
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_FP16
#endif
#include "lib/common.cuh"
#include "lib/fast.cuh"
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/attention/mma_work.cuh"
#include "lib/sm80.cuh"

#ifndef ATT_CACHED  // 1: K and V are read from a kv_cache; requires ATT_CAUSAL
#define ATT_CACHED 0
#endif
#ifndef ATT_WARPS
#define ATT_WARPS 4
#endif
#ifndef ATT_FRAGS  // fragments of 16 queries per warp
#define ATT_FRAGS 2
#endif
#ifndef ATT_STAGES
#define ATT_STAGES 3
#endif
#ifndef ATT_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define ATT_BLOCKS 2
#endif

constexpr int FRAGS = ATT_FRAGS, THREADS = 32 * ATT_WARPS;
constexpr int WARP_QUERIES = 16 * FRAGS, QUERIES = ATT_WARPS * WARP_QUERIES;
#include "lib/attention/mma_tile.cuh"
constexpr int STAGE = 2 * TILE;  // bytes of a tile of K and a tile of V
constexpr int DEPTH = SIZE / 16, COLUMNS = SIZE / 8;  // mma fragments per head, as operand and as result
constexpr int NEAR = KEYS / 8;                        // result fragments for the keys of a tile
constexpr int PART = COLUMNS > 16 ? 16 : COLUMNS;     // fragments of columns of V that are loaded at once
constexpr bool KEPT = SIZE <= 128;                    // true: the queries stay in registers
static_assert(!KEPT || QUERIES * PITCH <= STAGE, "queries arrive in one stage of the ring");
static_assert(ATT_STAGES >= 2, "one tile travels while another is multiplied");

#include "attention/prompt/mma_not_finite.cuh"

// A warp's state for its queries. Lane 4 g + t holds rows g and g + 8 of each fragment f.
struct Queries {
    unsigned q[FRAGS][KEPT ? DEPTH : 1][4];
    const char* rows;  // address of the lane's queries in shared memory
    float out[FRAGS][COLUMNS][4];
    float sum[FRAGS][2], reference[FRAGS][2];  // sum: sum of P over the lane's keys

    __device__ __forceinline__ Queries() {
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) out[f][n][0] = out[f][n][1] = out[f][n][2] = out[f][n][3] = 0.0f;
            sum[f][0] = sum[f][1] = 0.0f;
            reference[f][0] = reference[f][1] = -INFINITY;
        }
    }

    __device__ __forceinline__ void load(const char* first) {
        const int lane = threadIdx.x % 32;
        rows = first + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int i = 0; KEPT && i < FRAGS * DEPTH; ++i) load_query(q[i / DEPTH][i % DEPTH], i / DEPTH, i % DEPTH);
    }

    __device__ __forceinline__ void load_query(unsigned (&a)[4], int f, int k) const {
        load_matrices<false>(a[0], a[1], a[2], a[3], rows + 16 * f * PITCH + 32 * k);
    }

    // Processes a tile of keys. With MASKED, not all queries see all keys of the tile. If causal, row i of the warp
    // sees keys 0 .. last + i, or only the last WINDOW of these; otherwise all rows see keys 0 .. last.
    template <bool MASKED>
    __device__ __forceinline__ void take(const char* keys, const char* values, int last) {
        const int lane = threadIdx.x % 32;
        // The last key that row g = lane / 4 sees, relative to the lane's first key.
        const int sees = last + (ATT_CAUSAL ? lane / 4 : 0) - lane % 4 * 2;
        float s[FRAGS][NEAR][4];
        multiply_keys<MASKED>(s, keys, last);
        float base[FRAGS][2], factor[FRAGS][2];
        bool moves = false;
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) {
            float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < NEAR; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int ahead = 8 * n + e % 2 - (ATT_CAUSAL ? 16 * f + 8 * (e / 2) : 0);
                    if (MASKED && (ahead > sees || is_past(ahead, sees))) s[f][n][e] = -INFINITY;
                    largest[e / 2] = fmaxf(largest[e / 2], s[f][n][e]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float old = reference[f][r], next = fmaf(lanes_max<4>(largest[r]), UNIT, -BELOW);
                const bool passes = next > old + (AT_MOST - BELOW);  // false if all scores are -inf
                factor[f][r] = passes ? exp2_fast(old - next) : 1.0f;
                reference[f][r] = passes ? next : old;
                base[f][r] = reference[f][r] == -INFINITY ? 0.0f : -reference[f][r];  // not +inf: -inf + inf is NaN
                moves |= passes;
            }
        }
        if (__any_sync(0xffffffffu, moves)) rescale(factor);
        multiply_values<MASKED>(s, base, values, last);
    }

    // Returns whether no query of fragments `from` to `to` sees keys 8 n .. 8 n + 15 of a tile. The result is the same
    // for the whole warp.
    template <bool MASKED>
    static __device__ __forceinline__ bool hidden(int from, int to, int n, int last) {
        return MASKED && (8 * n > (ATT_CAUSAL ? last + 16 * to + 15 : last) || is_past(8 * n + 15, last + 16 * from));
    }

    template <bool MASKED>
    __device__ __forceinline__ void multiply_keys(float (&s)[FRAGS][NEAR][4], const char* keys, int last) const {
        const int lane = threadIdx.x % 32;
        keys += (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) {
#pragma unroll
            for (int n = 0; n < NEAR; ++n) s[f][n][0] = s[f][n][1] = s[f][n][2] = s[f][n][3] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            unsigned a[FRAGS][4];
#pragma unroll
            for (int i = 0; KEPT && i < 4 * FRAGS; ++i) a[i / 4][i % 4] = q[i / 4][k][i % 4];
#pragma unroll
            for (int f = 0; !KEPT && f < FRAGS; ++f) load_query(a[f], f, k);
#pragma unroll
            for (int n = 0; n < NEAR; n += 2) {
                if (hidden<MASKED>(0, FRAGS - 1, n, last)) continue;
                unsigned b[2][2];
                load_matrices<false>(b[0][0], b[0][1], b[1][0], b[1][1], keys + 8 * n * PITCH + 32 * k);
#pragma unroll
                for (int f = 0; f < FRAGS; ++f) {
                    if (hidden<MASKED>(f, f, n, last)) continue;
                    mma(s[f][n], a[f], b[0]);
                    mma(s[f][n + 1], a[f], b[1]);
                }
            }
        }
    }

    __device__ __forceinline__ void rescale(const float (&factor)[FRAGS][2]) {
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) {
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[f][r] *= factor[f][r];
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[f][n][e] *= factor[f][e / 2];
            }
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void multiply_values(const float (&s)[FRAGS][NEAR][4], const float (&base)[FRAGS][2],
                                                    const char* values, int last) {
        const int lane = threadIdx.x % 32;
        values += lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {  // one step per 16 keys
            if (hidden<MASKED>(0, FRAGS - 1, 2 * k, last)) continue;
            unsigned p[FRAGS][4];
#pragma unroll
            for (int part = 0; part < COLUMNS; part += PART) {
                const char* const here = values + 16 * k * PITCH + 16 * part;
                unsigned b[PART][2];
                load_values(b, here);
#pragma unroll
                for (int f = 0; f < FRAGS; ++f) {
                    if (hidden<MASKED>(f, f, 2 * k, last)) continue;
                    if (part == 0) make_weights(p[f], s[f], base[f], f, k);
                    constexpr bool ANY = ATT_CACHED || WINDOW;
                    const int ahead = ANY ? last + 16 * f - 16 * k : 0;  // query i sees keys 0 .. ahead + i of the 16
                    const bool in_part = ANY ? ahead < 15 || is_past(0, ahead + 15) : 16 * k == last + 16 * f;
                    if (MASKED && ATT_CAUSAL && in_part && any_not_finite(b)) {
                        multiply_apart(out[f] + part, p[f], b, ahead);
                        if (f + 1 < FRAGS) load_values(b, here);
                    } else {
#pragma unroll
                        for (int n = 0; n < PART; ++n) mma(out[f][part + n], p[f], b[n]);
                    }
                }
            }
        }
    }

    // Computes P (softmax weights) for 16 keys, and adds P to the sums of the rows.
    __device__ __forceinline__ void make_weights(unsigned (&p)[4], const float (&s)[NEAR][4], const float (&base)[2],
                                                 int f, int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // weights of row lane / 4 + 8 (i % 2), for keys 8 (i / 2) to 8 (i / 2) + 7
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                v[e] = exp2_fast(fmaf(s[2 * k + i / 2][i % 2 * 2 + e], UNIT, base[i % 2]));
                sum[f][i % 2] += v[e];
            }
            p[i] = pack2(v[0], v[1]);
        }
    }

    static __device__ __forceinline__ void load_values(unsigned (&b)[PART][2], const char* keys) {
#pragma unroll
        for (int n = 0; n < PART; n += 2) {
            load_matrices<true>(b[n][0], b[n][1], b[n + 1][0], b[n + 1][1], keys + 16 * n);
        }
    }

    // Stores the first `left` rows of the warp at address `to`; each lane stores 16 bytes at a time.
    __device__ __forceinline__ void store(T* to, long long stride, int left) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float factor = __fdividef(1.0f, lanes_sum<4>(sum[f][r]));
                const int row = 16 * f + 8 * r + g;
#pragma unroll
                for (int part = 0; part < SIZE / 32; ++part) {
                    unsigned v[4];
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const float(&c)[4] = out[f][4 * part + n];
                        v[n] = pack2(c[2 * r] * factor, c[2 * r + 1] * factor);
                    }
                    turn(v, t);
                    T* at = to + row * stride + 32 * part + 8 * t;
                    if (row < left) *reinterpret_cast<uint4*>(at) = {v[0], v[1], v[2], v[3]};
                }
            }
        }
    }
};

// Addresses of a block's queries, and of the keys and values that these queries see.
struct Place {
    const T *q, *k, *v;  // q: address of the sequence's first query; k, v: addresses for position 0
    long long q_stride, kv_stride;
    int start;  // position of the first row
    T* out;     // address for the sequence's first query
    int C;
};

__device__ __forceinline__ void attend(char* ring, const Job& job, const Place& at) {
    const int start = ATT_CACHED ? at.start : 0, end = start + job.length;  // rows are at positions start .. end - 1
    const int keys = ATT_CAUSAL ? min(end, start + job.first + QUERIES) : end;  // the queries see keys 0 .. keys - 1
    const int first_key = first_seen(start + job.first) / KEYS * KEYS;
    char* const asked = ring + (KEPT ? ATT_STAGES - 1 : ATT_STAGES) * STAGE;
    copy_rows<QUERIES>(asked, at.q + job.first * at.q_stride, at.q_stride, job.length - job.first);
    int arriving = first_key;  // first key of the next tile to be copied
    const auto ask = [&](char* stage) {
        if (arriving < keys) {
            copy_rows<KEYS>(stage, at.k + arriving * at.kv_stride, at.kv_stride, end - arriving);
            copy_rows<KEYS>(stage + TILE, at.v + arriving * at.kv_stride, at.kv_stride, end - arriving);
        }
        end_group();
        arriving += KEYS;
    };
#pragma unroll 1
    for (int i = 0; i < ATT_STAGES - 1; ++i) ask(ring + i * STAGE);

    const int warp = threadIdx.x / 32 * WARP_QUERIES;  // the warp's first query in the block's tile
    const int first = job.first + warp;
    Queries queries;
    wait_for_groups<ATT_STAGES - 2>();
    __syncthreads();
    queries.load(asked + warp * PITCH);
    char *stage = ring, *empty = ring + (ATT_STAGES - 1) * STAGE;
#pragma unroll 1
    for (int key = first_key; key < keys; key += KEYS) {
        wait_for_groups<ATT_STAGES - 2>();
        __syncthreads();  // the tile is complete; no thread still reads the previous tile or the queries
        ask(empty);
        const int last = (ATT_CAUSAL ? start + first : end - 1) - key;
        const int rows = ATT_CAUSAL ? WARP_QUERIES - 1 : 0;
        if (first < job.length && last + rows >= 0 && !is_past(KEYS - 1, last)) {
            if (last >= KEYS - 1 && !is_past(0, last + rows)) {
                queries.take<false>(stage, stage + TILE, last);
            } else {
                queries.take<true>(stage, stage + TILE, last);
            }
        }
        empty = stage;
        stage = stage == ring + (ATT_STAGES - 1) * STAGE ? ring : stage + STAGE;
    }
    queries.store(at.out + (long long)first * at.C, at.C, job.length - first);
}

// Launched by operation (variant): attention (mma), attention_varlen (mma)
extern "C" __global__ void __launch_bounds__(THREADS, ATT_BLOCKS) attention_mma(
    const T* qkv,           // (rows, W)
    const int* cu_seqlens,  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out,                 // (rows, C)
    int B,
    int seq_len,            // length of the longest sequence
    int n_head,
    int together) {         // heads whose blocks run at the same time
    extern __shared__ __align__(16) char ring[];
    let_next_start();
    wait_for_previous();
    const Job job = choose_job(cu_seqlens, B, seq_len, n_head, together, QUERIES);
    if (job.first >= job.length) return;
    const int C = SIZE * n_head, KV = C / ATT_SERVES, shared_head = job.head / ATT_SERVES;
    const long long stride = C + 2LL * KV;
    const T *row = qkv + job.row * stride, *k = row + C + SIZE * shared_head;
    attend(ring, job, {row + SIZE * job.head, k, k + KV, stride, stride, 0, out + job.row * C + SIZE * job.head, C});
}

// A sequence that would exceed row N or position n_ctx is truncated.
// Launched by operation (variant): attention_packed (mma), attention_queries (mma)
extern "C" __global__ void __launch_bounds__(THREADS, ATT_BLOCKS) attention_cached_mma(
    const T* q,             // (N, C), rows q_distance apart
    const T* k,             // (B, n_ctx, C / ATT_SERVES)
    const T* v,             // (B, n_ctx, C / ATT_SERVES)
    const int* cu_seqlens,  // (B + 1), not decreasing
    const int* start,       // (B)
    T* out,                 // (N, C)
    int q_distance, int n_ctx, int N, int B,
    int seq_len,            // length of the longest sequence
    int n_head,
    int together) {
    extern __shared__ __align__(16) char ring[];
    let_next_start();
    wait_for_previous();
    Job job = choose_job(cu_seqlens, B, seq_len, n_head, together, QUERIES);
    const int first = max(__ldcg(start + job.sequence), 0), rows = (int)min((long long)job.length, N - job.row);
    job.length = min(rows, n_ctx - first);
    if (job.row < 0 || job.first >= job.length) return;
    const int C = SIZE * n_head, KV = C / ATT_SERVES;
    const long long held = (long long)job.sequence * n_ctx * KV + SIZE * (job.head / ATT_SERVES);
    const T* of_head = q + job.row * q_distance + SIZE * job.head;
    attend(ring, job,
           {of_head, k + held, v + held, q_distance, KV, first, out + job.row * C + SIZE * job.head, C});
}
