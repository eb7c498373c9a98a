// Four floats at a time: loads, stores, and copies from global to shared memory that pass no register (cp.async). GPUs
// before sm_80 have no such copies: there the values pass through registers and are waited for.
#pragma once

__device__ __forceinline__ float4 ld_vec(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ void st_vec(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

// 16 bytes from global to shared memory, there after wait_for_copies.
__device__ __forceinline__ void copy_vec(float* shared, const float* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
#else
    st_vec(shared, ld_vec(global));
#endif
}

// For this thread's copies; a barrier makes those of the others visible, too.
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
