// Programmatic dependent launch: two consecutive kernels overlap. GPUs from sm_90 on support it.
//
//   kernel n     [ weights | wait | work ........... ]
//   kernel n+1             [ weights | wait ......... | work ... ]
//
// A kernel launched this way starts when every block of the previous kernel has called let_next_start() or has ended.
// wait_for_previous() returns when the previous kernel has ended and its results are visible. The previous kernel
// waited for its predecessor in the same way, so all earlier kernels have ended, too. Every block of every kernel in
// the chain must therefore wait, except in the first kernel, which is launched normally. Until a thread has called
// wait_for_previous(), or has passed a barrier that another thread reached after this call, it
//
//   may load    data that no kernel of the chain writes: weights, tensor maps, parameters, settings. Such data was
//               complete when the chain began
//   must not    load a result of any earlier kernel: even kernels before the previous one may still be running
//   must not    store anything, because earlier kernels may still read or write the same memory. Resetting a counter
//               and atomic operations are stores, too
//   may         prefetch any address into the L2 cache, or load a value that another kernel is still changing, if no
//               result depends on this value (load it as volatile, or relaxed at the scope of the GPU)
//
// let_next_start() makes no writes visible. A kernel may call it before all other work, because the next kernel waits
// for the end of this kernel.
//
// Values written by an earlier kernel must not be loaded through the read-only cache, because this cache is not
// invalidated between the kernels. Load such values with __ldcg, or plainly through a pointer that is not const
// __restrict__. Copies by TMA also need a fence: wait_before_copies() in lib/sm90.cuh. In a normal launch,
// and on older GPUs, kernels do not overlap and both functions do nothing.
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
