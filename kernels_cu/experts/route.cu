// The router of a mixture of experts: the experts that each row uses, and their weights.
//
//   logits = x router^T  (M, E) for x (M, C), router (E, C)
//   scores = softmax(logits), or with ROUTE_SIGMOID 1 / (1 + exp(-logits))
//   routes (M, 2 n_used): the numbers of the n_used experts with the highest scores + bias, the highest first, as
//   floats; then their weights: score [/ (sum of the scores of the row's chosen experts + eps)] * factor
//
//   route: a warp computes the logits of ROUTE_EACH experts for ROUTE_ROWS rows; the blocks of a cluster divide the
//       experts. Then each block chooses the experts of some of the rows
//
//   logit    lane l adds the products of the vectors l, l + 32, ... of four channels in their order, with fused
//            multiply-adds; then shuffles add the sums of the lanes. This order depends on C alone, so a row has the
//            same bits in any batch
//   weights  registers hold a chunk of ROUTE_VECTORS vectors per lane and expert for all rows. The first chunk is
//            loaded before the wait for the previous kernel
//   choice   the rank of an expert is the number of experts with a higher score + bias, or with an equal one and a
//            lower number. NaN is lower than all numbers. RANKING lanes count for one expert
//
// grid (ROUTE_CLUSTER, ceil(M / ROUTE_ROWS)), block (512). Dynamic shared memory, computed by the Python module
// `experts`: x (ROUTE_ROWS, CHUNK), scores and keys (ROUTE_ROWS, E each), chosen experts (ROUTE_ROWS, MAX_USED). C is a
// multiple of 4.
#include "lib/common.cuh"
#include "lib/cluster.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

#ifndef ROUTE_ROWS  // rows per cluster
#define ROUTE_ROWS 1
#endif
#ifndef ROUTE_EACH  // experts per warp
#define ROUTE_EACH 1
#endif
#ifndef ROUTE_VECTORS  // vectors of four channels per lane, expert and chunk
#define ROUTE_VECTORS 16
#endif
#ifndef ROUTE_CLUSTER  // blocks per cluster
#define ROUTE_CLUSTER 1
#endif
#ifndef ROUTE_SIGMOID
#define ROUTE_SIGMOID 0
#endif
#if ROUTE_CLUSTER == 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

constexpr int WARPS = 16, THREADS = 32 * WARPS, ROWS = ROUTE_ROWS, EACH = ROUTE_EACH, VECTORS = ROUTE_VECTORS;
constexpr int CLUSTER = ROUTE_CLUSTER, CHUNK = 128 * VECTORS;
constexpr int MAX_USED = 32;  // maximum of n_used: one lane per chosen expert
constexpr int RANKING = 4;
typedef Vec<float, 4> Four;

// Returns an integer whose order is the order of floats. Zeros of both signs are equal, and NaN is lowest.
__device__ __forceinline__ unsigned key_of(float v) {
    const int bits = __float_as_int(v + 0.0f);
    return v == v ? (unsigned)(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u : 0;
}

// Launched by operation (variant): route (experts routed)
extern "C" __global__ void __cluster_dims__(ROUTE_CLUSTER, 1, 1) __launch_bounds__(THREADS) route(
    const float* x,                    // (M, C)
    const float* __restrict__ router,  // (E, C)
    const float* __restrict__ bias,    // (E) or null
    float* routes,                     // (M, 2 n_used)
    int M, int C, int E, int n_used, int normed, float factor, float eps) {
    extern __shared__ float4 memory[];
    Four* const values = reinterpret_cast<Four*>(memory);  // x
    float* const scores = reinterpret_cast<float*>(values + ROWS * CHUNK / 4);
    unsigned* const keys = reinterpret_cast<unsigned*>(scores + ROWS * E);
    int* const chosen = reinterpret_cast<int*>(keys + ROWS * E);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * ROWS;
    const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    if (CLUSTER > 1) arrive_in_cluster();

    for (int group = 0; group * WARPS * CLUSTER * EACH < E; ++group) {
        const int expert = ((group * WARPS + warp) * CLUSTER + rank) * EACH;  // the warp's first expert
        float sums[ROWS][EACH] = {};
        for (int at = 0; at < C; at += CHUNK) {
            Four held[EACH][VECTORS];
#pragma unroll
            for (int i = 0; i < EACH * VECTORS; ++i) {
                const int e = expert + i / VECTORS, k = at + 4 * (i % VECTORS * 32 + lane);
                Four& to = held[i / VECTORS][i % VECTORS];
                to = e < E && k < C ? load_parameters<4>(router + (long long)e * C + k) : Four{};
            }
            if (group == 0 && at == 0) {
                let_next_start();
                wait_for_previous();
            }
            if (group == 0 || C > CHUNK) {
                __syncthreads();  // all warps have read the previous chunk of x
                for (int i = threadIdx.x; i < ROWS * CHUNK / 4; i += THREADS) {
                    const int m = first + i / (CHUNK / 4), k = at + i % (CHUNK / 4) * 4;
                    const float* const from = x + (long long)m * C + k;
                    values[i] = m < M && k < C ? load_fresh<float, 4>(from) : Four{};
                }
                __syncthreads();
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    float own[4], w[4];
                    values[r * (CHUNK / 4) + 32 * i + lane].unpack(own);
#pragma unroll
                    for (int j = 0; j < EACH; ++j) {
                        held[j][i].unpack(w);
#pragma unroll
                        for (int n = 0; n < 4; ++n) sums[r][j] = fmaf(own[n], w[n], sums[r][j]);
                    }
                }
            }
        }
        if (CLUSTER > 1 && group == 0) wait_for_cluster();  // other blocks have started: their memory can be written
#pragma unroll
        for (int i = 0; i < ROWS * EACH; ++i) {
            const int r = i / EACH, e = expert + i % EACH;
            const float logit = lanes_sum<32>(sums[r][i % EACH]);
            if (lane || e >= E) continue;
            float* const to = scores + r * E + e;
            *(CLUSTER > 1 ? in_block_of_cluster(to, r % CLUSTER) : to) = logit;
        }
    }
    if (CLUSTER > 1) release_to_cluster(), acquire_from_cluster();
    else __syncthreads();

    const int rows = min(ROWS, M - first);
    for (int r = rank + CLUSTER * warp; r < rows; r += CLUSTER * WARPS) {  // block r % CLUSTER has the logits of row r
        float* const own = scores + r * E;
        float largest = -INFINITY, sum = 0.0f;
        for (int e = lane; e < E; e += 32) largest = fmaxf(largest, own[e]);
        largest = lanes_max<32>(largest);
        for (int e = lane; e < E; e += 32) {
            own[e] = ROUTE_SIGMOID ? 1.0f / (1.0f + expf(-own[e])) : expf(own[e] - largest);
            sum += own[e];
        }
        sum = ROUTE_SIGMOID ? 1.0f : lanes_sum<32>(sum);
        for (int e = lane; e < E; e += 32) {
            own[e] /= sum;
            keys[r * E + e] = key_of(own[e] + (bias ? bias[e] : 0.0f));
        }
    }
    __syncthreads();
    const int counted = rows > rank ? (rows - rank + CLUSTER - 1) / CLUSTER * E : 0;  // experts of the block's rows
    for (int begin = 0; begin < counted; begin += THREADS / RANKING) {
        const int i = begin + threadIdx.x / RANKING, e = i % E, r = rank + i / E * CLUSTER;
        int before = 0;
        if (i < counted) {
            const unsigned* const of = keys + r * E;
            const unsigned key = of[e];
            for (int o = threadIdx.x % RANKING; o < E; o += RANKING) before += of[o] > key || (of[o] == key && o < e);
        }
#pragma unroll
        for (int bit = 1; bit < RANKING; bit *= 2) before += __shfl_xor_sync(0xffffffffu, before, bit);
        if (i < counted && before < n_used && threadIdx.x % RANKING == 0) chosen[r * MAX_USED + before] = e;
    }
    __syncthreads();
    for (int r = rank + CLUSTER * warp; r < rows; r += CLUSTER * WARPS) {
        const bool there = lane < n_used;
        const int e = there ? chosen[r * MAX_USED + lane] : 0;
        const float score = there ? scores[r * E + e] : 0.0f, sum = normed ? lanes_sum<32>(score) + eps : 1.0f;
        float* const to = routes + (long long)(first + r) * 2 * n_used;
        if (there) to[lane] = (float)e, to[n_used + lane] = score / sum * factor;
    }
}
