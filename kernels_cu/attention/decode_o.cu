// architecture: sm_90a
// Attention of one query per row as in attention/decode.cu, and the product with o in the same kernel, for few rows:
// a step of one row is a chain of kernels, each of which waits for the one before.
//
//   splits[s] = split s of attention W^T        W (C, C), C = NH HS; K and V have as many heads
//
// The order of additions is that of matmul/decode_order.cuh. A split of K is two heads, which one cluster computes. The
// next kernel adds the splits to x in their order (Parts in matmul/decode_mma.cuh).
//
//   cluster   head 2s: AS_CLUSTER blocks | head 2s + 1: as many        as in attention/decode.cu
//             the first block of each head sends the head to all blocks, as terms, by st.async
//             each block computes C / (2 AS_CLUSTER) outputs, 16 a warp, of both heads
//
// W is requested before the wait for the previous kernel. It waits in shared memory, where each lane has what it will
// multiply itself.
//
// Grid (AS_CLUSTER, NH, M), block (32 AS_WARPS); 2 AS_CLUSTER above 8 must be allowed by cuFuncSetAttribute.
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_FP16
#endif
#ifndef AS_CLUSTER
#define AS_CLUSTER 8
#endif
#include "attention/decode.cu"
#include "lib/stream.cuh"
#include "matmul/decode_order.cuh"
#if defined(__CUDA_ARCH__)
#include "lib/sm90.cuh"
#endif

constexpr int O_BLOCKS = 2 * AS_CLUSTER, O_OWN = ROW / O_BLOCKS;  // blocks of a cluster, outputs of a block
constexpr int O_TILES = (O_OWN + 15) / 16;                        // of 16 outputs, a warp's
constexpr int O_CHUNKS = order::UNIT / order::CHUNK;
constexpr int O_TERM = 2 * order::UNIT + (sizeof(W) == 1 ? 16 : 64);  // bytes from the high to the low terms
constexpr int O_VECTORS = 2 * 2 * 32 / 16;                            // of 16 bytes: the terms of 32 channels
static_assert(2 * HS == order::UNIT && order::split_units(ROW) == 1, "a split of K is two heads");
static_assert(NH % 2 == 0 && NKV == NH && AS_HEADS == 1 && AS_QUERIES == 1, "a block is of one head");
static_assert(ROW % O_BLOCKS == 0 && O_TILES <= AS_WARPS && CHUNKS <= AS_WARPS, "there are warps enough");
static_assert(!order::FLOATS, "of 16 bits or FP8");

struct Exchange {
    alignas(16) char terms[2 * O_TERM];     // of both heads
    uint4 staged[CHUNKS][O_VECTORS];        // of this head, in its first block
    uint4 w[O_CHUNKS][2][32 * O_TILES];     // the weights of a lane
    alignas(8) unsigned long long arrived;  // a Barrier
};

__device__ __forceinline__ void open_cluster(Exchange& shared) {
#if defined(__CUDA_ARCH__)
    if (threadIdx.x == 0) {
        Barrier& arrived = reinterpret_cast<Barrier&>(shared.arrived);
        init(arrived, 1);
        arrive_and_expect(arrived, 2 * CHUNKS * O_VECTORS * 16);
        fence_inits();
    }
    __syncwarp();
    arrive_in_cluster();
#endif
}

// Requests the block's weights of both heads.
__device__ __forceinline__ void request(Exchange& shared, const W* w, int first, int split) {
    const int g = threadIdx.x % 32 / 4, k = split * order::UNIT + threadIdx.x % 4 * order::WIDTH;
    if (threadIdx.x >= 32 * O_TILES) return;
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
        const int own = threadIdx.x / 32 * 16 + 8 * octet + g;
        const W* from = w + (long long)(first + own) * ROW + k;
#pragma unroll
        for (int chunk = 0; chunk < O_CHUNKS; ++chunk) {
            copy16(&shared.w[chunk][octet][threadIdx.x], from + chunk * order::CHUNK, own < O_OWN);
        }
    }
}

// Sends a warp's 32 channels of a head to all blocks of the cluster.
__device__ __forceinline__ void send(Exchange& shared, float result) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float term = term_of<order::BRAIN>(result);
    reinterpret_cast<float*>(shared.staged[warp])[lane % 2 * 16 + lane / 2] = term;
    __syncwarp();
#pragma unroll
    for (int i = lane; i < O_VECTORS * O_BLOCKS; i += 32) {
        const int vector = i % O_VECTORS, low = vector >= O_VECTORS / 2, at = vector - low * (O_VECTORS / 2);
        const float4 v = reinterpret_cast<const float4*>(shared.staged[warp])[vector];
        char* to = shared.terms + low * O_TERM + 2 * (blockIdx.y % 2 * HS + 32 * warp) + 16 * at;
#if defined(__CUDA_ARCH__)
        store_at(i / O_VECTORS, to, reinterpret_cast<Barrier&>(shared.arrived), v.x, v.y, v.z, v.w);
#else
        *reinterpret_cast<float4*>(to) = v;
#endif
    }
}

__device__ __forceinline__ void wait_for_heads(Exchange& shared) {
#if defined(__CUDA_ARCH__)
    wait<true>(reinterpret_cast<Barrier&>(shared.arrived), 0, "heads");
#else
    __syncthreads();
#endif
}

// The block's outputs of the split, to splits[first].
__device__ __forceinline__ void multiply_o(Exchange& shared, float* to) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (warp >= O_TILES) return;
    float sum[4] = {};
#pragma unroll
    for (int chunk = 0; chunk < O_CHUNKS; ++chunk) {
        order::Rows x;
        x.load(shared.terms + 2 * (chunk * order::CHUNK + t * order::WIDTH), O_TERM);
        const uint4 lower = shared.w[chunk][0][threadIdx.x], upper = shared.w[chunk][1][threadIdx.x];
        order::add_chunk(sum, order::Columns(lower, upper), x);
    }
    // All rows of the tile are copies of one.
    const int own = warp * 16 + 8 * t + g;
    if (t < 2 && own < O_OWN) to[own] = t == 0 ? sum[0] + sum[1] : sum[2] + sum[3];
}

extern "C" __global__ void __cluster_dims__(AS_CLUSTER, 2, 1) __launch_bounds__(32 * AS_WARPS, AS_BLOCKS) attention_o(
    const float* q,           // (M, C)
    const KV* k,              // (B, n_ctx, C)
    const KV* v,              // (B, n_ctx, C)
    const int* row,           // (M): no kernel that can overlap with this one writes it
    const int* position,      // (M)
    const W* __restrict__ w,  // (C, C)
    float* splits,            // (NH / 2, M, C)
    int B, int n_ctx) {
    __shared__ Shared shared;
    __shared__ Exchange exchange;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x, head = blockIdx.y;
    const long long query = blockIdx.z;
    const int maybe = load_racing(position + query), b = __ldcg(row + query);
    const int worker = warp * AS_CLUSTER + rank, column = head * HS + lane % LANES * AS_WIDTH;
    const bool cached = b >= 0 && b < B;
    const int hint = cached ? min(maybe, n_ctx - 1) : -1;
    open_cluster(exchange);

    const long long from = ((long long)b * n_ctx + lane / LANES) * KV_ROW + column;
    const KV *const own_k = k + from, *const own_v = v + from;
    int first = worker * KEYS;  // key of the round
    Held keys, values;
    keys.load(own_k, first, hint - 1);
    values.load(own_v, first, hint - 1);
    const int place = head % 2 * AS_CLUSTER + rank;
    request(exchange, w, place * O_OWN, head / 2);
    end_group();
    let_next_start();
    wait_for_previous();
    if (!cached) return;

    float x[PIECES][AS_WIDTH] = {};
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        if (VECTORS % LANES && lane % LANES + p * LANES >= VECTORS) continue;
        load_fresh_floats<AS_WIDTH>(q + query * ROW + column + p * LANES * AS_WIDTH, x[p]);
    }
    if (first <= hint && hint < first + ROUND) {
        keys.add(own_k, first, hint, hint);
        values.add(own_v, first, hint, hint);
    }
    const int last = min(__ldcg(position + query), n_ctx - 1);
    if (last < 0) return;
    if (last != hint) {  // the hint was wrong: repeat the loads
        keys.load(own_k, first, last);
        values.load(own_v, first, last);
    }
    if (AS_CLUSTER > 1) wait_for_cluster();  // all blocks run, so that their shared memory can be written

    const int parts = last / KEYS + 1;
    int split = worker;
    Whole whole;
    for (int begin = 0;; begin += SPAN) {
        const int count = min(parts - begin, SPAN);
#pragma unroll 1
        for (; split < begin + count; split += WORKERS) {
            Softmax softmax;
#pragma unroll 1
            for (int round = 0; round < ROUNDS; ++round) {
                const int next = round + 1 < ROUNDS ? first + ROUND : (split + WORKERS) * KEYS;
                float s[HELD];
                multiply(x, keys, s);
                if (next <= last) keys.load(own_k, next, last);
                score(first, last, s);
                softmax.add(s, values);
                if (next <= last) values.load(own_v, next, last);
                first = next;
            }
            softmax.store(shared, 0, split % SPAN, head % 2 * AS_CLUSTER);
        }
        const bool more = begin + SPAN < parts;
        if (rank > 0 && !more) {
            release_to_cluster();  // arrives and does not wait
            break;
        }
        sync_team();
        if (rank == 0 && warp < CHUNKS) whole.add(shared, 0, warp * 32 + lane, count, begin > 0);
        if (!more) break;
        sync_team();  // before the next span overwrites the splits
    }
    if (rank == 0 && warp < CHUNKS) send(exchange, whole.o / whole.l);
    wait_for_groups<0>();  // of what this thread has copied, and no other reads
    wait_for_heads(exchange);
    multiply_o(exchange, splits + ((long long)(head / 2) * gridDim.z + query) * ROW + place * O_OWN);
}
