// Loads for kernels that overlap with the previous kernel (lib/overlap.cuh). Loads of constants are issued before the
// wait for the previous kernel. Loads of data that an earlier kernel has written are issued after this wait and bypass
// the read-only cache.
#pragma once
#include "lib/storage.cuh"

template <typename E, int WIDTH>
__device__ __forceinline__ Vec<E, WIDTH> load_fresh(const E* from) {
    typedef typename Vec<E, WIDTH>::Raw Raw;
    return {__ldcg(reinterpret_cast<const Raw*>(from))};
}

// Loads WIDTH floats, in vectors of up to four.
template <int WIDTH>
__device__ __forceinline__ void load_fresh_floats(const float* from, float* v) {
    constexpr int LOAD = WIDTH < 4 ? WIDTH : 4;
    typedef typename Bits<4 * LOAD>::type Raw;
#pragma unroll
    for (int first = 0; first < WIDTH; first += LOAD) {
        const Raw raw = __ldcg(reinterpret_cast<const Raw*>(from + first));
#pragma unroll
        for (int e = 0; e < LOAD; ++e) v[first + e] = reinterpret_cast<const float*>(&raw)[e];
    }
}

// Loads WIDTH constants. Inline assembly keeps the compiler from moving these loads after the wait for the previous
// kernel.
template <int WIDTH>
__device__ __forceinline__ Vec<float, WIDTH> load_parameters(const float* from) {
#if defined(__CUDA_ARCH__)
    if constexpr (WIDTH == 4) {
        Vec<float, 4> four;
        float* v = reinterpret_cast<float*>(&four.raw);
        asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "l"(from));
        return four;
    }
#endif
    return Vec<float, WIDTH>::load(from);
}

// Loads a value that another kernel may be writing at the same time: returns the old value or the new one.
__device__ __forceinline__ int load_racing(const int* from) {
#if defined(__CUDA_ARCH__)
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
#else
    return *from;
#endif
}
