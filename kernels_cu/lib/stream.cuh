// Loads of weights, which are read only once.
#pragma once
#include "lib/storage.cuh"

// Loads a vector of weights. Inline assembly keeps the load before the wait for the previous kernel. The cache hint
// makes the L2 cache fetch 128 bytes, because neighbouring threads or blocks soon need the other sectors of these 128
// bytes.
template <typename Vector>
__device__ __forceinline__ Vector stream_in(const W* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    if constexpr (sizeof(Vector) == 16) {
        Vector v;
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.raw.x), "=r"(v.raw.y), "=r"(v.raw.z), "=r"(v.raw.w)
                     : "l"(from));
        return v;
    }
#endif
    return Vector::load_once(from);
}
