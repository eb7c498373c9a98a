// launch: grid=ceil(n / block) block=256
#include "lib/storage.cuh"
extern "C" __global__ void silu_compact(const T* gate, const T* up, T* out, long long n) {
    const unsigned short base = blockIdx.x * blockDim.x;
    const unsigned short i = base + threadIdx.x;
    if (i < n) {
        const float g = widen(gate[i]), s = 1.0f / (1.0f + expf(-g));
        out[i] = narrow(g * s * widen(up[i]));
    }
}
