// launch: grid=ceil((n + 1) // 2 / block) block=128
#include <cuda_fp16.h>
#include "lib/storage.cuh"

__device__ float silu(float g) { return g / (1.0f + expf(-g)); }

extern "C" __global__ void silu_pairs(const T* gate, const T* up, T* out, long long n) {
    const long long i = 2 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 1 < n) {
        const float2 g = __half22float2(*reinterpret_cast<const __half2*>(gate + i));
        const float2 u = __half22float2(*reinterpret_cast<const __half2*>(up + i));
        *reinterpret_cast<__half2*>(out + i) = __floats2half2_rn(silu(g.x) * u.x, silu(g.y) * u.y);
    } else if (i < n) {
        out[i] = narrow(silu(widen(gate[i])) * widen(up[i]));
    }
}
