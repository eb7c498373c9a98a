// Exchange of the hidden channels h, which the first product of matmul/decode/ffn_mma.cu and
// matmul/decode/ffn_mma_gguf.cu computes and the second product reads: each block of a cluster computes some columns of
// h and sends them to the other blocks.
#pragma once
#include "lib/cluster.cuh"
#include "lib/decode/mma.cuh"
#if defined(__CUDA_ARCH__)
#include "lib/sm90.cuh"
#endif

#ifndef FF_H  // H, the number of hidden channels; x has DECODE_K channels
#define FF_H 2048
#endif
#ifndef FF_CLUSTER  // blocks of a cluster; each cluster computes one split (range) of H
#define FF_CLUSTER 16
#endif

constexpr int H_LENGTH = order::split_length(FF_H);
constexpr int OWN = H_LENGTH / FF_CLUSTER;  // columns of h per block
constexpr int SENT = 4 * OWN / 16;          // 16-byte vectors of h that a block sends per row
static_assert(FF_H % H_LENGTH == 0, "blocks are alike");
static_assert(H_LENGTH % FF_CLUSTER == 0 && OWN % 8 == 0, "blocks have whole eights");

__device__ constexpr int aligned16(int bytes) { return (bytes + 15) / 16 * 16; }

// Initialises `arrived`, 8 bytes of shared memory, as the mbarrier at which the columns of h arrive; then arrives at
// the cluster's barrier.
__device__ __forceinline__ void open_cluster(char* arrived) {
#if defined(__CUDA_ARCH__)
    if (threadIdx.x == 0) {
        Barrier& barrier = *reinterpret_cast<Barrier*>(arrived);
        init(barrier, 1);
        arrive_and_expect(barrier, DECODE_ROWS * FF_CLUSTER * SENT * 16);
        fence_inits();
    }
    __syncwarp();
    arrive_in_cluster();
#endif
}

// Sends the block's columns of h to all blocks of the cluster, and waits for the columns of all blocks. The sums of all
// warps are in shared memory. complete(r), called by one warp, must store the block's columns of row r at `staged` + r
// * 4 OWN. 16-byte vector i of these columns goes to the shared-memory address place(r, i) of each block.
template <typename Complete, typename Place>
__device__ __forceinline__ void exchange_hidden(const char* staged, char* arrived, Complete complete, Place place) {
    __syncthreads();
#if defined(__CUDA_ARCH__)
    wait_for_cluster();  // the barriers of all blocks are initialised
#endif
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < DECODE_ROWS; r += WARPS) {
        complete(r);
#pragma unroll
        for (int i = threadIdx.x % 32; i < SENT * FF_CLUSTER; i += 32) {
            const float4 v = reinterpret_cast<const float4*>(staged + r * 4 * OWN)[i % SENT];
            char* const to = place(r, i % SENT);
#if defined(__CUDA_ARCH__)
            store_at(i / SENT, to, *reinterpret_cast<Barrier*>(arrived), v.x, v.y, v.z, v.w);
#else
            *reinterpret_cast<float4*>(to) = v;
#endif
        }
    }
#if defined(__CUDA_ARCH__)
    wait<true>(*reinterpret_cast<Barrier*>(arrived), 0, "hidden");
#else
    __syncthreads();
#endif
}
