// launch: grid=ceil(n / block) block=256
#include "lib/storage.cuh"

__device__ float sigmoid(float g) {
    const float e = expf(g);
    return e / (1.0f + e);
}

extern "C" __global__ void silu_gate(const T* gate, const T* up, T* out, long long n) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        const float g = widen(gate[i]);
        out[i] = narrow(g * sigmoid(g) * widen(up[i]));
    }
}
