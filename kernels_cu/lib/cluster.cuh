// Clusters: up to 8 blocks (16 if cuFuncSetAttribute allows them) on neighbouring multiprocessors, which can access
// each other's shared memory. They need sm_90 or newer. On older GPUs a kernel runs with clusters of one block and must
// not call these functions.
#pragma once

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

__device__ __forceinline__ int rank_in_cluster() {
    int rank = 0;
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// Returns the address in block `rank` of the cluster that corresponds to `here` in this block's shared memory.
template <typename E>
__device__ __forceinline__ E* in_block_of_cluster(E* here, int rank) {
    E* there = here;
#if defined(__CUDA_ARCH__)
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
#endif
    return there;
}

template <typename E>
__device__ __forceinline__ E* in_first_block(E* here) {
    return in_block_of_cluster(here, 0);
}

// A barrier for all threads of the cluster that have not exited: sync_cluster(), or arrive_in_cluster() and later
// wait_for_cluster(). The barrier does not make memory writes visible to other threads, except for initialised barriers
// after fence_inits(). All threads of a warp must call these functions together.
__device__ __forceinline__ void arrive_in_cluster() {
#if defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void sync_cluster() {
    arrive_in_cluster();
    wait_for_cluster();
}

// A barrier of the cluster in two steps. Memory writes of all threads before release_to_cluster() are visible to a
// thread after its call of acquire_from_cluster().
__device__ __forceinline__ void release_to_cluster() {
#if defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void acquire_from_cluster() {
#if defined(__CUDA_ARCH__)
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
