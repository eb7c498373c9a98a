// launch: grid=ceil(n / 512) block=256
#include "lib/storage.cuh"

struct Silu {
    __device__ float operator()(float g) const { return g * (1.0f / (1.0f + expf(-g))); }
};

template <typename Gate, int COUNT>
__device__ void gated(const T* gate, const T* up, T* out, long long n, Gate f) {
    const long long first = (long long)blockIdx.x * blockDim.x * COUNT + threadIdx.x;
    for (int k = 0; k < COUNT; ++k) {
        const long long i = first + k * (int)blockDim.x;
        if (i < n) out[i] = narrow(f(widen(gate[i])) * widen(up[i]));
    }
}

extern "C" __global__ void silu_functor(const T* gate, const T* up, T* out, long long n) {
    gated<Silu, 2>(gate, up, out, n, Silu());
}
