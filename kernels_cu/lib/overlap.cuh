// Programmatic dependent launch: two consecutive kernels overlap. GPUs from sm_90 on support it.
//
//   kernel n     [ weights | wait | work ........... ]
//   kernel n+1             [ weights | wait ......... | work ... ]
//
// A kernel launched this way starts when every block of the previous kernel has called let_next_start() or has ended.
// It can load data that no kernel writes, the weights above all, immediately. wait_for_previous() returns when the
// previous kernel has ended and its results are visible. As the previous kernel waited too, all earlier kernels have
// then ended. So every block of every kernel in the chain must wait, except for the first kernel, which is launched
// normally.
//
// Values written by an earlier kernel must not be loaded through the read-only cache, which is not invalidated between
// the kernels. Load them with __ldcg, or plainly through a pointer that is not const __restrict__. In a normal launch,
// and on older GPUs, nothing overlaps and both functions do nothing.
#pragma once

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
