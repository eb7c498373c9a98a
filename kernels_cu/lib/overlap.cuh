// Programmatic dependent launch: two consecutive kernels overlap. GPUs from sm_90 on support it.
//
//   kernel n     [ weights | wait | work ........... ]
//   kernel n+1             [ weights | wait ......... | work ... ]
//
// A kernel launched this way starts when every block of the previous kernel has called let_next_start() or has ended.
// wait_for_previous() returns when the previous kernel has ended and its results are visible. As the previous kernel
// waited too, all earlier kernels have then ended. So every block of every kernel in the chain must wait, except for
// the first kernel, which is launched normally. Before it waits, or passes a barrier after another thread has waited, a
// thread
//
//   may load    what no kernel of the chain writes: weights, tensor maps, parameters, settings. They were complete when
//               the chain began
//   must not    load a result of any earlier kernel, not only of the previous one: none needs to have ended
//   must not    store anything, as earlier kernels may still read or write it. Nor may it reset a counter or use an
//               atomic operation
//   may         prefetch any address into the L2 cache, or load a value that is still changing as a hint on which no
//               result depends (volatile, or relaxed at the scope of the GPU)
//
// let_next_start() makes nothing visible, and the next kernel does not wait for it: it may be the first call.
//
// Values written by an earlier kernel must not be loaded through the read-only cache, which is not invalidated between
// the kernels. Load them with __ldcg, or plainly through a pointer that is not const __restrict__. The copy engine also
// needs a fence: wait_before_copies() in lib/sm90.cuh. In a normal launch, and on older GPUs, nothing overlaps and both
// functions do nothing.
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
