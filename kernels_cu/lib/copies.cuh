// Loads and stores of four floats, and copies from global to shared memory that bypass the registers (cp.async). GPUs
// before sm_80 have no cp.async: the copies are then synchronous and go through registers.
#pragma once

__device__ __forceinline__ float4 ld_vec(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ void st_vec(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

// Copies 16 bytes from global to shared memory. The data is available after wait_for_copies().
__device__ __forceinline__ void copy_vec(float* shared, const float* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
#else
    st_vec(shared, ld_vec(global));
#endif
}

// Copies one float in the same way.
__device__ __forceinline__ void copy_float(float* shared, const float* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
#else
    *shared = *global;
#endif
}

// Waits for this thread's copies. To read the copies of other threads, call a barrier afterwards.
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
