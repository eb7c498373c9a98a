// Exchange of the hidden channels h, which the first product of matmul/decode/ffn_mma.cu and
// matmul/decode/ffn_mma_gguf.cu computes and the second one reads: each block of a cluster computes some columns of h
// and sends them to the other blocks.
#pragma once
#include "lib/cluster.cuh"
#include "lib/decode/mma.cuh"
#if defined(__CUDA_ARCH__)
#include "lib/sm90.cuh"
#endif

#ifndef FF_H  // H, the number of hidden channels; x has LM_K channels
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
        arrive_and_expect(barrier, LM_ROWS * FF_CLUSTER * SENT * 16);
        fence_inits();
    }
    __syncwarp();
    arrive_in_cluster();
#endif
}

// Sends the block's columns of one row of h to all blocks of the cluster. Called by one warp. 16-byte vector i of the
// columns, which are at `from`, is stored at the shared-memory address place(i) of each block.
template <typename Place>
__device__ __forceinline__ void send_row(const char* from, char* arrived, Place place) {
#pragma unroll
    for (int i = threadIdx.x % 32; i < SENT * FF_CLUSTER; i += 32) {
        const float4 v = reinterpret_cast<const float4*>(from)[i % SENT];
        char* const to = place(i % SENT);
#if defined(__CUDA_ARCH__)
        store_at(i / SENT, to, *reinterpret_cast<Barrier*>(arrived), v.x, v.y, v.z, v.w);
#else
        *reinterpret_cast<float4*>(to) = v;
#endif
    }
}

// Waits until the columns of h from all blocks of the cluster have arrived in this block.
__device__ __forceinline__ void wait_for_hidden(char* arrived) {
#if defined(__CUDA_ARCH__)
    wait<true>(*reinterpret_cast<Barrier*>(arrived), 0, "hidden");
#else
    __syncthreads();
#endif
}
