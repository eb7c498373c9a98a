// Tile-by-tile attention, shared by learn/attention/online.cu and attention/prompt/cores.cu.
//
// A block processes a tile of QUERIES queries, and K and V in tiles of KEYS rows. Over the keys processed so far, it
// keeps for each query the largest score m, the sum l of exp(score - m) and the sum o of exp(score - m) V. If a tile
// has a larger m, both sums are scaled by exp(m - new m). The result is o / l.
//
//                 K, V ->
//             [ m m . . . . ]   x  a tile whose keys all queries of the block see
//        Q    [ x x m m . . ]   m  a tile that the causal mask crosses: each product with V is masked
//        |    [ x x x x m m ]   .  neither read nor computed
//        v                      each line: the queries of one block; blocks with the most work start first
//
// Each tile of keys takes two matrix products, whose arithmetic limits the speed of the kernel. A thread holds 8x8
// results of each product in registers: scores of 8 queries and 8 keys, and sums o of these queries in 8 channels (HS
// and KEYS 64).
//
//     K (KEYS, HS) in shared memory        V (KEYS, HS) in shared memory
//             |                                    |
//        S = Q K^T  --- m, l --->  P = exp(S - m)  |       each product: 16 reads of 16 bytes, without bank
//             |                           |        |       conflicts, for every 256 multiply-adds
//     Q (QUERIES, HS) in shared    o = o exp(m - new m) + P V
//
// P passes through shared memory, 32 keys at a time. A warp reads only values of P that it wrote itself, so no block
// barrier is needed. V is loaded (cp.async) while S is computed, and the next K while o is computed. K and V therefore
// need only one buffer each, and each tile of keys needs only two barriers.
//
//   a thread's queries     4 r + ty          (r = 0..ROWS-1, ty = 0..3)
//   a thread's keys        32 g + 4 tx + e   (g = 0..KEYS/32-1, tx = 0..7, e = 0..3), in s[r][4 g + e]
//   a thread's channels    32 g + 4 tx + e, in o[r][g][e]
//
// Heads of more than 256 channels, or of 256 on a GPU with 64 KB of shared memory: K and V have one buffer in turn.
// Then a tile of V is loaded when all threads have read the tile of K, and threads convert it to floats in registers.
//
// K and V of 16 bits or FP8 are copied unconverted to a separate buffer. Each thread converts the 16-byte pieces that
// it has copied to floats in the tile, before the barrier that makes them visible to other threads. The order of
// additions for a query depends only on KEYS, not on the other queries or on the query's position in a block.
//
// Any number of queries and keys. Any HS up to 512: larger heads have fewer queries per warp, so that o fits in
// registers. If HS is a multiple of 4 (with 16-bit K and V: of 8; with FP8: of 16), rows are aligned to 16 bytes and
// are copied in 16-byte pieces. GPUs before sm_80 have no cp.async: copies are synchronous and go through registers.
//
// Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe and Staats, "Self-attention
// Does Not Need O(n^2) Memory" (2021); Dao et al., "FlashAttention" (2022).
#pragma once
#include "lib/attention/unit.cuh"
#include "lib/attention/window.cuh"
#include "lib/common.cuh"
#include "lib/copies.cuh"
#include "lib/fresh.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef NKV  // heads of K, and of V
#define NKV NH
#endif
#ifndef HS
#define HS 64
#endif
#ifndef AO_WARPS  // warps per block
#define AO_WARPS 4
#endif
#ifndef AO_KEYS  // keys per tile
#define AO_KEYS 64
#endif
#ifndef AO_ROWS  // queries per thread
#define AO_ROWS (HS <= 64 ? 8 : HS <= 128 ? 4 : HS <= 256 ? 2 : 1)
#endif
#ifndef AO_ONE_TILE  // whether K and V have one buffer
#define AO_ONE_TILE (HS > 256)
#endif
#ifndef AO_UNROLL  // unroll factor of loops that add 4 products per step
#define AO_UNROLL 1
#endif
static_assert(NH % NKV == 0, "every head of K serves as many heads of Q");
static_assert(NH > 0 && HS > 0 && HS <= 512, "o must fit in registers: HS <= 512");
static_assert(AO_WARPS > 0 && AO_WARPS <= 8, "a thread needs up to 255 registers: at most 8 warps");
static_assert(AO_KEYS > 0 && AO_KEYS % 32 == 0, "a warp's threads hold 32 keys at a time");

constexpr int GROUP = NH / NKV;  // heads of Q that share a head of K
constexpr int ROWS = AO_ROWS;
constexpr int COLUMNS = AO_KEYS / 8;    // keys per thread
constexpr int GROUPS = (HS + 31) / 32;  // groups of 32 channels; a thread has 4 channels of each
constexpr int THREADS = 32 * AO_WARPS;
constexpr int WARP_QUERIES = 4 * ROWS;
constexpr int QUERIES = WARP_QUERIES * AO_WARPS;
constexpr int KEYS = AO_KEYS;
constexpr int DEPTH = (HS + 3) / 4 * 4;      // HS rounded up to a multiple of 4; padding is 0
constexpr int STRIDE = 4 * (DEPTH / 4 | 1);  // floats between rows; 8 consecutive rows start in different banks
constexpr int V_STRIDE = 32 * GROUPS;
constexpr bool ONE_TILE = AO_ONE_TILE;
constexpr int P_STRIDE = 32 + 16;  // floats between rows: no bank conflicts in stores of 4 float4 to each of 2 rows

// Divides COUNT rows of a head into pieces of WIDTH elements, and calls copy(row, more, d) for each of this thread's
// pieces. The piece starts with element `d` of row `row` + `more`. The pieces of a warp are contiguous. If all pieces
// of a thread have the same d, `row` is the thread's first row, and `more` is a compile-time constant. With WIDTH 1,
// the padding elements are included.
template <int COUNT, int WIDTH, typename Copy>
__device__ __forceinline__ void for_each_piece(Copy copy) {
    constexpr int PIECES = DEPTH / WIDTH, STEP = PIECES <= THREADS ? THREADS / PIECES : 1;
    constexpr bool KEEPS_TO_D = STEP * PIECES == THREADS && (STEP & (STEP - 1)) == 0 && COUNT % STEP == 0;
    if constexpr (WIDTH > 1 && KEEPS_TO_D) {
#pragma unroll 8  // a higher factor would take registers that the sums o need
        for (int more = 0; more < COUNT; more += STEP) copy(threadIdx.x / PIECES, more, threadIdx.x % PIECES * WIDTH);
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < COUNT * PIECES; i += THREADS) copy(i / PIECES, 0, i % PIECES * WIDTH);
    }
}

// Returns the row of a tile of K in shared memory that holds a key. Neighbouring threads, whose keys are 4 apart, read
// neighbouring rows. place(a + b) = place(a) + place(b) if a + b has no carry between bits.
//   key   0 1  2  3 4 5  6  7 8  9 10 ... 31
//   row   0 8 16 24 1 9 17 25 2 10 18 ... 31
__device__ __forceinline__ int place(int key) { return key / 32 * 32 + key % 4 * 8 + key % 32 / 4; }

template <typename E>
constexpr int ACROSS = HS % (16 / (int)sizeof(E)) ? 1 : 16 / (int)sizeof(E);  // elements per piece (16 bytes, or 1)
template <typename E>
constexpr bool STAGED = sizeof(E) < 4 && ACROSS<E> > 1 && !ONE_TILE;

template <typename E>
__device__ __forceinline__ float as_float(E value) {
    if constexpr (sizeof(E) < 4) {
        return widen(value);
    } else {
        return value;  // widen() converts T, which need not be float
    }
}

// Copies COUNT rows of a head, `distance` elements apart, to shared memory: floats directly to the tile, other types to
// the buffer `staged`, or, with WIDENS, converted to float in registers to the tile. Rows after the end of the sequence
// are copies of its last row; no query sees them.
template <int COUNT, int TO_STRIDE, bool PLACED, bool WIDENS, typename E>
__device__ __forceinline__ void copy_rows(float* to, E* staged, const E* head, int distance, int first, int rows) {
    for_each_piece<COUNT, ACROSS<E>>([&](int row, int more, int d) {
        const E* from = head + (long long)min(first + row + more, rows - 1) * distance + d;
        float* there = to + (PLACED ? place(row) + place(more) : row + more) * TO_STRIDE + d;
        if constexpr (ACROSS<E> == 1) {
            *there = d < HS ? as_float(*from) : 0.0f;
        } else if constexpr (sizeof(E) == 4) {
            copy_vec(there, from);
        } else if constexpr (WIDENS) {
            float v[ACROSS<E>];
            load_fresh<E, ACROSS<E>>(from).unpack(v);
#pragma unroll
            for (int e = 0; e < ACROSS<E>; e += 4) {
                st_vec(there + e, make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]));
            }
        } else {
            copy_vec(reinterpret_cast<float*>(staged + (row + more) * HS + d), reinterpret_cast<const float*>(from));
        }
    });
}

// Converts the 16-byte pieces that this thread has copied to `staged` to float. Call it after wait_for_copies().
template <int COUNT, int TO_STRIDE, bool PLACED, typename E>
__device__ __forceinline__ void widen_rows(float* to, const E* staged) {
    if constexpr (STAGED<E>) {
        for_each_piece<COUNT, ACROSS<E>>([&](int row, int more, int d) {
            float* there = to + (PLACED ? place(row) + place(more) : row + more) * TO_STRIDE + d;
            typedef Vec<E, ACROSS<E>> Piece;
            float v[ACROSS<E>];
            Piece{*reinterpret_cast<const typename Piece::Raw*>(staged + (row + more) * HS + d)}.unpack(v);
#pragma unroll
            for (int e = 0; e < ACROSS<E>; e += 4) {
                st_vec(there + e, make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]));
            }
        });
    }
}

__device__ __forceinline__ void add_product(float (&sum)[4], float a, float4 b) {
    sum[0] += a * b.x;
    sum[1] += a * b.y;
    sum[2] += a * b.z;
    sum[3] += a * b.w;
}

// s = Q K^T for the thread's queries and keys. `q` points to the thread's first query, `k` to its first key. The thread
// has every 4th row of Q and every 8th row of K.
__device__ __forceinline__ void compute_scores(float (&s)[ROWS][COLUMNS], const float* q, const float* k) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) s[r][c] = 0.0f;
    }
#pragma unroll AO_UNROLL
    for (int d = 0; d < DEPTH; d += 4) {
        float4 b[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) b[c] = ld_vec(k + 8 * c * STRIDE + d);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4 a = ld_vec(q + 4 * r * STRIDE + d);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[r][c] += a.x * b[c].x;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[r][c] += a.y * b[c].y;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[r][c] += a.z * b[c].z;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[r][c] += a.w * b[c].w;
        }
    }
}

// o += P V for 32 keys, the first of which has index `key`. MASKED: the thread's query r sees keys up to last + r *
// step, or with a window only the last WINDOW of these keys. Products with other keys are skipped, not multiplied by 0,
// because the values may be NaN.
template <bool MASKED>
__device__ __forceinline__ void add_values(
    float (&o)[ROWS][GROUPS][4], const float* p, const float* v, int key, int last, int step) {
#pragma unroll AO_UNROLL
    for (int j = 0; j < 32; j += 4) {
        float4 a[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) a[r] = ld_vec(p + 4 * r * P_STRIDE + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float4 b[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) b[g] = ld_vec(v + (j + e) * V_STRIDE + 32 * g);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float weight = e == 0 ? a[r].x : e == 1 ? a[r].y : e == 2 ? a[r].z : a[r].w;
                if (MASKED && (key + j + e > last + r * step || is_past(key + j + e, last + r * step))) continue;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) add_product(o[r][g], weight, b[g]);
            }
        }
    }
}

template <typename Op>
__device__ __forceinline__ float combine_row(float value) {  // combines the values of the 8 threads that share a query
    value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 4));
    return Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 8));
}

// The inputs and output of attention for one head of one sequence. E: type of K and V. Q: type of queries and output.
template <typename E, typename Q = float>
struct Task {
    const Q* q;                // (queries, HS), rows q_distance elements apart
    const E *k, *v;            // (rows, HS), rows kv_distance elements apart
    int q_distance, kv_distance;
    int queries, start, rows;  // query i is at position start + i; rows: number of keys
    long long out_row;         // output row of query 0
};

// Computes attention. find(b, h) returns the Task of head h of sequence b. Block (32 * AO_WARPS), grid (B * NH,
// ceil(queries / QUERIES)). tiles: dynamic shared memory for q_s, k_s, v_s, p_s and `staged`.
template <typename E, typename Q, typename Find>
__device__ __forceinline__ void attend(float* tiles, Q* out, int causal, Find find) {
    float* const q_s = tiles;                   // (QUERIES, HS), rows STRIDE floats apart
    float* const k_s = q_s + QUERIES * STRIDE;  // (KEYS, HS), rows STRIDE floats apart
    float* const v_s = k_s + (ONE_TILE ? 0 : KEYS * STRIDE);  // (KEYS, HS), rows V_STRIDE floats apart
    // (QUERIES, 32), rows P_STRIDE floats apart
    float* const p_s = v_s + KEYS * (ONE_TILE && STRIDE > V_STRIDE ? STRIDE : V_STRIDE);
    E* const staged = reinterpret_cast<E*>(p_s + QUERIES * P_STRIDE);  // (KEYS, HS), if K and V are not float

    // The bits of the lane number are permuted so that each half of a warp reads 8 rows of K and 2 rows of Q at a time.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tx = (lane & 1) | (lane >> 1 & 6), ty = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int row = WARP_QUERIES * warp + ty;  // the thread's first row in q_s and p_s
    const float* q = q_s + row * STRIDE;
    const float* k = k_s + tx * STRIDE;
    const float* v = v_s + 4 * tx;
    float* p = p_s + row * P_STRIDE;

    const long long b = blockIdx.x / NH, h = blockIdx.x % NH;
    const Task<E, Q> task = find(b, h);
    const int queries = task.queries, start = task.start, rows = task.rows;
    const int tile = causal ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    const int block_query = tile * QUERIES, warp_query = block_query + WARP_QUERIES * warp, query = block_query + row;
    const int n_keys = causal ? min(rows, start + block_query + QUERIES) : rows;  // keys that the block's queries see
    const int some_see = warp_query >= queries ? 0  // end of the keys that any query of the warp sees
                         : causal              ? min(rows, start + warp_query + WARP_QUERIES)
                                               : rows;
    const int all_see = causal ? start + warp_query + 1 : rows;  // end of the keys that all queries of the warp see
    const int first_key = first_seen(start + block_query) / KEYS * KEYS;  // first key of the block's first tile of keys
    const int none_before = first_seen(start + warp_query);  // first key that any query of the warp sees
    const int all_from = first_seen(start + warp_query + WARP_QUERIES - 1);
    const int last = causal ? start + query : rows - 1, step = causal ? 4 : 0;  // query r sees keys 0..last + r * step

    const float unit = score_unit(HS);  // exp(x / sqrt(HS)) = exp2(x * unit); a compile-time constant
    float o[ROWS][GROUPS][4], m[ROWS], l[ROWS];  // l: sum of exp(score - m) over the thread's keys
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        m[r] = -INFINITY;
        l[r] = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[r][g][e] = 0.0f;
        }
    }

    // Queries are loaded only once, so each thread converts them.
    copy_rows<QUERIES, STRIDE, false, true>(q_s, (Q*)nullptr, task.q, task.q_distance, block_query, queries);
    copy_rows<KEYS, STRIDE, true, ONE_TILE>(k_s, staged, task.k, task.kv_distance, first_key, rows);
#pragma unroll 1
    for (int key = first_key; key < n_keys; key += KEYS) {
        if (ONE_TILE && key > first_key) {
            __syncthreads();  // all threads have read the tile of V
            copy_rows<KEYS, STRIDE, true, ONE_TILE>(k_s, staged, task.k, task.kv_distance, key, rows);
        }
        wait_for_copies();
        widen_rows<KEYS, STRIDE, true>(k_s, staged);
        __syncthreads();  // the tile of K is complete; all threads have read the previous tile of V
        if (!ONE_TILE) copy_rows<KEYS, V_STRIDE, false, ONE_TILE>(v_s, staged, task.v, task.kv_distance, key, rows);
        float s[ROWS][COLUMNS];
        if (key < some_see && key + KEYS > none_before) compute_scores(s, q, k);
        if (ONE_TILE) {
            __syncthreads();  // all threads have read the tile of K
            copy_rows<KEYS, V_STRIDE, false, ONE_TILE>(v_s, staged, task.v, task.kv_distance, key, rows);
        }
        wait_for_copies();
        widen_rows<KEYS, V_STRIDE, false>(v_s, staged);
        __syncthreads();  // the tile of V is complete; all threads have read the tile of K
        if (!ONE_TILE && key + KEYS < n_keys) {
            copy_rows<KEYS, STRIDE, true, ONE_TILE>(k_s, staged, task.k, task.kv_distance, key + KEYS, rows);
        }
        if (key >= some_see || key + KEYS <= none_before) continue;

        const bool masked = key + KEYS > all_see || key < all_from;
        if (masked) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const int own = key + c / 4 * 32 + 4 * tx + c % 4;
                    if (own > last + r * step || is_past(own, last + r * step)) s[r][c] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float max = s[r][0];
#pragma unroll
            for (int c = 1; c < COLUMNS; ++c) max = fmaxf(max, s[r][c]);
            max = fmaxf(m[r], combine_row<reduction::Max>(max));
            const float point = max == -INFINITY ? 0.0f : max;  // exp2(-inf - 0) is 0, but exp2(-inf + inf) is NaN
            const float scale = exp2f((m[r] - point) * unit);
            m[r] = max;
            l[r] *= scale;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                s[r][c] = exp2f((s[r][c] - point) * unit);
                l[r] += s[r][c];
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[r][g][e] *= scale;
            }
        }
#pragma unroll
        for (int g = 0; g < KEYS / 32; ++g) {
            const int first = key + 32 * g;
            if (first >= some_see) break;
            __syncwarp();  // all lanes have read the previous values of P
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float* w = s[r] + 4 * g;
                st_vec(p + 4 * r * P_STRIDE + 4 * tx, make_float4(w[0], w[1], w[2], w[3]));
            }
            __syncwarp();
            if (masked) {
                add_values<true>(o, p, v + 32 * g * V_STRIDE, first, last, step);
            } else {
                add_values<false>(o, p, v + 32 * g * V_STRIDE, first, last, step);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float scale = 1.0f / combine_row<reduction::Sum>(l[r]);
        if (query + 4 * r >= queries) continue;
        Q* to = out + (task.out_row + query + 4 * r) * (NH * HS) + h * HS + 4 * tx;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int channels = HS - 32 * g - 4 * tx;  // channels of the head from the thread's first channel on
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = o[r][g][e] * scale;
#if HS % 4 == 0
            if (channels > 0) Vec<Q, 4>::store(to + 32 * g, y);
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < channels) narrow_to(to[32 * g + e], y[e]);
            }
#endif
        }
    }
}
