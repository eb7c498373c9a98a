// launch: grid=min(ceil(n / block), 300) block=224
#include "lib/storage.cuh"
extern "C" __global__ void silu_fast(const T* gate, const T* up, T* out, long long n) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        const float g = widen(gate[i]);
        out[i] = narrow(__fdividef(g, 1.0f + expf(-g)) * widen(up[i]));
    }
}
