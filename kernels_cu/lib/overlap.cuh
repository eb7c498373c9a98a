// Two kernels in a row that overlap: programmatic dependent launch, which GPUs of sm_90 and later have.
//
//   kernel n     [ weights | wait | work ........... ]
//   kernel n+1             [ weights | wait ......... | work ... ]
//
// A kernel launched this way starts when every block of the one before has called let_next_start(), or has ended. What
// no kernel writes, weights above all, it can ask for at once. wait_for_previous() returns when the kernel before has
// ended and what it wrote can be read. As that one waited too, all earlier kernels have ended then: every block of
// every kernel in such a row must wait, but for the first one, whose launch is an ordinary one.
//
// Values that an earlier kernel wrote must not come through the read-only cache, which nobody clears in between: they
// are loaded with __ldcg, or plainly through a pointer that is not const __restrict__. In an ordinary launch, and on
// older GPUs, nothing overlaps and both functions do nothing.
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
