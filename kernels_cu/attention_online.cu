// Attention that never stores the T x T matrix: out = softmax(Q K^T / sqrt(HS)) V, head by head.
//
//   qkv (B, T, 3C)   a row is [Q | K | V], C = NH HS, the heads packed side by side inside each
//   out (B, T, C)
//
//   attention_..._kernel1      in attention_forward.cu: three kernels, all scores in device memory
//   mha_causal_kernel          in attention.cu: a block a query, its row of scores in shared memory
//   attention_forward_online   here: a block many queries, a tile of scores at a time, in registers
//
// A block walks along K and V, KEYS rows at a time. Of the keys behind it, it keeps for each query the largest score
// m, the sum l of exp(score - m) and the sum o of exp(score - m) V. A tile that brings a larger m has both sums
// scaled by exp(m - new m); the result is o / l.
//
//                 K, V ->
//             [ m m . . . . ]   x  a tile seen whole
//        Q    [ x x m m . . ]   m  a tile that the causal mask crosses: each product with V asks if its key is seen
//        |    [ x x x x m m ]   .  neither read nor computed
//        v                      a row is a block's QUERIES queries; the longest first, so that short ones fill the end
//
// A tile is two matrix products, whose arithmetic is what bounds the kernel. Each is done as such: a thread holds 8x8
// of the scores of its warp's 32 queries and KEYS keys, and 8x8 of o, in registers all the way.
//
//     K (KEYS, HS) in shared memory        V (KEYS, HS) in shared memory
//             |                                    |
//        S = Q K^T  --- m, l --->  P = exp(S - m)  |       16 reads of 16 bytes, without bank conflicts, for 256
//             |                           |        |       multiply-adds in both products
//     Q (QUERIES, HS) in shared    o = o exp(m - new m) + P V
//
// P goes through shared memory, 32 keys at a time. A warp reads what it wrote itself: that takes no barrier of the
// block. V travels (cp.async) while S is computed, the next K while o is: one buffer each, two barriers a tile.
//
//   a thread's queries     4 r + ty          (r = 0..ROWS-1, ty = 0..3)
//   its keys               32 g + 4 tx + e   (tx = 0..7, e = 0..3), in s[r][4 g + e]
//   its channels of o      the same, in o[r][g][e]
//
// Block (32 AO_WARPS), grid (B NH, ceil(T / QUERIES)), dynamic shared memory: the four arrays at the kernel's start.
// Any T. Any HS up to 256: a larger head means fewer queries a warp, so that o stays in registers. Where HS is a
// multiple of 4, qkv and out start on 16 bytes, and rows move in such pieces. GPUs before sm_80 have no cp.async:
// there tiles pass through registers and are waited for.
//
// Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Rabe and Staats, "Self-attention
// Does Not Need O(n^2) Memory" (2021); Dao et al., "FlashAttention" (2022).
#include "common.cuh"
#include "copies.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef HS
#define HS 64
#endif
#ifndef AO_WARPS  // of a block
#define AO_WARPS 4
#endif
#ifndef AO_KEYS  // of a tile
#define AO_KEYS 64
#endif
#ifndef AO_UNROLL  // steps of 4 terms of a sum that are written out one after the other
#define AO_UNROLL 1
#endif
static_assert(NH > 0 && HS > 0 && HS <= 256, "o must fit in registers: HS <= 256");
static_assert(AO_WARPS > 0 && AO_WARPS <= 8, "a thread needs up to 255 registers: at most 8 warps");
static_assert(AO_KEYS > 0 && AO_KEYS % 32 == 0, "a warp's threads hold 32 keys at a time");

constexpr int ROW = 3 * NH * HS;                        // from one row of a head to the next
constexpr int ROWS = HS <= 64 ? 8 : HS <= 128 ? 4 : 2;  // a thread's queries
constexpr int COLUMNS = AO_KEYS / 8;                    // a thread's keys
constexpr int GROUPS = (HS + 31) / 32;                  // of 32 channels, 4 of them a thread's
constexpr int THREADS = 32 * AO_WARPS;
constexpr int WARP_QUERIES = 4 * ROWS;
constexpr int QUERIES = WARP_QUERIES * AO_WARPS;
constexpr int KEYS = AO_KEYS;
constexpr int DEPTH = (HS + 3) / 4 * 4;      // HS in whole float4, filled up with zeros
constexpr int STRIDE = 4 * (DEPTH / 4 | 1);  // 8 rows in a row then start in 8 different groups of 4 banks
constexpr int V_STRIDE = 32 * GROUPS;
constexpr int P_STRIDE = 32 + 16;  // the 4 float4 that a quarter of a warp stores in each of two rows: 8 groups again

// Calls copy(row, more, d) for every float4 of COUNT rows of a head: of row + more, from element d on. A warp's lie
// side by side. Where a thread can keep to one d, row is its first row and more a constant to the compiler. With HS
// no multiple of 4, for every float: also for those that only fill up the last four.
template <int COUNT, typename Copy>
__device__ __forceinline__ void for_each_piece(Copy copy) {
    constexpr int WIDTH = HS % 4 ? 1 : 4, PIECES = DEPTH / WIDTH, STEP = PIECES <= THREADS ? THREADS / PIECES : 1;
    constexpr bool KEEPS_TO_D = STEP * PIECES == THREADS && (STEP & (STEP - 1)) == 0 && COUNT % STEP == 0;
    if constexpr (WIDTH == 4 && KEEPS_TO_D) {
#pragma unroll 8  // more of them at once would take the registers of o
        for (int more = 0; more < COUNT; more += STEP) copy(threadIdx.x / PIECES, more, threadIdx.x % PIECES * WIDTH);
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < COUNT * PIECES; i += THREADS) copy(i / PIECES, 0, i % PIECES * WIDTH);
    }
}

// Where a key stands in a tile of K: key 4 i + e of each 32 in row 8 e + i, so that threads side by side, whose keys
// are 4 apart, read rows side by side. It moves bits only: place(a + b) is place(a) + place(b) when no bit carries.
__device__ __forceinline__ int place(int key) { return key / 32 * 32 + key % 4 * 8 + key % 32 / 4; }

// Sends COUNT rows of a head to shared memory. Past the end of the sequence its last row stands in, seen by no query.
template <int COUNT, int TO_STRIDE, bool PLACED>
__device__ __forceinline__ void copy_rows(float* to, const float* head, int first, int T) {
    for_each_piece<COUNT>([&](int row, int more, int d) {
        const float* from = head + (long long)min(first + row + more, T - 1) * ROW + d;
        float* there = to + (PLACED ? place(row) + place(more) : row + more) * TO_STRIDE + d;
#if HS % 4 == 0
        copy_vec(there, from);
#else
        *there = d < HS ? *from : 0.0f;
#endif
    });
}

__device__ __forceinline__ void add_product(float (&sum)[4], float a, float4 b) {
    sum[0] += a * b.x;
    sum[1] += a * b.y;
    sum[2] += a * b.z;
    sum[3] += a * b.w;
}

// s = Q K^T of the thread's queries and keys; q and k point to its first rows, the others follow every 4 and every 8.
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

// o += P V for 32 keys, the first of them number `key`. MASKED: query r sees keys up to last + r * step. A product
// with any other is left out, not multiplied by 0: what stands there may be NaN.
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
                if (MASKED && key + j + e > last + r * step) continue;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) add_product(o[r][g], weight, b[g]);
            }
        }
    }
}

template <typename Op>
__device__ __forceinline__ float combine_row(float value) {  // over the 8 threads that share a query
    value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 4));
    return Op::combine(value, __shfl_xor_sync(0xffffffffu, value, 8));
}

// The bound of 1 block: else the compiler spills some registers in order that more small blocks fit.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward_online(
    const float* __restrict__ qkv,  // (B, T, 3C), a row is [Q | K | V]
    float* __restrict__ out,        // (B, T, C)
    int T, int causal) {            // causal: query t sees keys 0..t, else all
    extern __shared__ __align__(16) float tiles[];
    float* const q_s = tiles;                   // (QUERIES, HS), rows STRIDE apart
    float* const k_s = q_s + QUERIES * STRIDE;  // (KEYS, HS), rows STRIDE apart
    float* const v_s = k_s + KEYS * STRIDE;     // (KEYS, HS), rows V_STRIDE apart
    float* const p_s = v_s + KEYS * V_STRIDE;   // (QUERIES, 32), rows P_STRIDE apart

    // The bits of the lane are mixed so that each half of a warp reads 8 rows of K and 2 of Q at a time.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tx = (lane & 1) | (lane >> 1 & 6), ty = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int row = WARP_QUERIES * warp + ty;  // of q_s and p_s
    const float* q = q_s + row * STRIDE;
    const float* k = k_s + tx * STRIDE;
    const float* v = v_s + 4 * tx;
    float* p = p_s + row * P_STRIDE;

    const long long b = blockIdx.x / NH, h = blockIdx.x % NH;
    const float* head_q = qkv + b * T * ROW + h * HS;
    const float* head_k = head_q + NH * HS;
    const float* head_v = head_k + NH * HS;

    const int tile = causal ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    const int block_query = tile * QUERIES, warp_query = block_query + WARP_QUERIES * warp, query = block_query + row;
    const int n_keys = causal ? min(T, block_query + QUERIES) : T;   // that some query of the block sees
    const int some_see = warp_query >= T ? 0 : causal ? min(T, warp_query + WARP_QUERIES) : T;  // of the warp's queries
    const int all_see = causal ? warp_query + 1 : T;                 // of the warp's queries: no mask before
    const int last = causal ? query : T - 1, step = causal ? 4 : 0;  // query r sees keys 0..last + r * step

    const float unit = 1.4426950408889634f / sqrtf((float)HS);  // exp(x / sqrt(HS)) is exp2(x unit); a constant
    float o[ROWS][GROUPS][4], m[ROWS], l[ROWS];  // l: of the thread's keys alone, until the end
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

    copy_rows<QUERIES, STRIDE, false>(q_s, head_q, block_query, T);
    copy_rows<KEYS, STRIDE, true>(k_s, head_k, 0, T);
#pragma unroll 1
    for (int key = 0; key < n_keys; key += KEYS) {
        wait_for_copies();
        __syncthreads();  // K is there, and the V before has been read
        copy_rows<KEYS, V_STRIDE, false>(v_s, head_v, key, T);
        float s[ROWS][COLUMNS];
        if (key < some_see) compute_scores(s, q, k);
        wait_for_copies();
        __syncthreads();  // V is there, and K has been read
        if (key + KEYS < n_keys) copy_rows<KEYS, STRIDE, true>(k_s, head_k, key + KEYS, T);
        if (key >= some_see) continue;

        const bool masked = key + KEYS > all_see;
        if (masked) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    if (key + c / 4 * 32 + 4 * tx + c % 4 > last + r * step) s[r][c] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float max = s[r][0];
#pragma unroll
            for (int c = 1; c < COLUMNS; ++c) max = fmaxf(max, s[r][c]);
            max = fmaxf(m[r], combine_row<Max>(max));
            const float point = max == -INFINITY ? 0.0f : max;  // exp2(-inf - 0) is 0, exp2(-inf + inf) NaN
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
            __syncwarp();  // the weights before have been read
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
        const float scale = 1.0f / combine_row<Sum>(l[r]);
        if (query + 4 * r >= T) continue;
        float* to = out + (b * T + query + 4 * r) * (NH * HS) + h * HS + 4 * tx;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const float* from = o[r][g];
            const int channels = HS - 32 * g - 4 * tx;  // that are left
#if HS % 4 == 0
            if (channels > 0) {
                st_vec(to + 32 * g, make_float4(from[0] * scale, from[1] * scale, from[2] * scale, from[3] * scale));
            }
#else
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (e < channels) to[32 * g + e] = from[e] * scale;
            }
#endif
        }
    }
}
