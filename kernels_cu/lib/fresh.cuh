// Vectors of what an earlier kernel has written: loads that pass by the read-only cache (lib/overlap.cuh says why).
#pragma once
#include "lib/storage.cuh"

template <typename E, int WIDTH>
__device__ __forceinline__ Vec<E, WIDTH> load_fresh(const E* from) {
    typedef typename Vec<E, WIDTH>::Raw Raw;
    return {__ldcg(reinterpret_cast<const Raw*>(from))};
}

// Floats as they are, whatever T is: float4 after float4, or as many at a time as WIDTH has.
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
