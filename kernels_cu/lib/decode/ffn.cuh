// The hidden channels h between the two products of matmul/decode/ffn_mma.cu and matmul/decode/ffn_mma_gguf.cu: each
// block of a cluster computes a part of h and sends it to the other blocks.
#pragma once
#include "lib/cluster.cuh"
#include "lib/decode/mma.cuh"
#if defined(__CUDA_ARCH__)
#include "lib/sm90.cuh"
#endif

#ifndef FF_H  // H, the number of hidden channels; x has LM_K channels
#define FF_H 2048
#endif
#ifndef FF_CLUSTER  // blocks of the cluster that computes one split of H
#define FF_CLUSTER 16
#endif

constexpr int H_LENGTH = order::split_length(FF_H);
constexpr int OWN = H_LENGTH / FF_CLUSTER;  // columns of h per block
constexpr int SENT = 4 * OWN / 16;          // 16-byte vectors of h that a block sends per row, as floats or terms
static_assert(FF_H % H_LENGTH == 0, "blocks are alike");
static_assert(H_LENGTH % FF_CLUSTER == 0 && OWN % 8 == 0, "blocks have whole eights");

__device__ constexpr int aligned16(int bytes) { return (bytes + 15) / 16 * 16; }

// Initialises the barrier for the arrival of h, and arrives at the cluster's barrier. arrived: 8 bytes of shared memory
// for the Barrier.
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

// Sends the block's part of a row of h to all blocks of the cluster; called by one warp. The 16-byte vector i after
// `from` is stored at place(i) in each block.
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

// Waits until the columns of h of all blocks have arrived in this block.
__device__ __forceinline__ void wait_for_hidden(char* arrived) {
#if defined(__CUDA_ARCH__)
    wait<true>(*reinterpret_cast<Barrier*>(arrived), 0, "hidden");
#else
    __syncthreads();
#endif
}
