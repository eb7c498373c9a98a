// The gate of Llama's feed-forward: out = gate / (1 + exp(-gate)) * up
//
// One thread per element.
//   gpt2block kernels silu_mul --mine my.cu
//
// The launch line may use n and block. T is the type of --dtype, float32 by default; see
// kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(n / block) block=256
#include "lib/storage.cuh"

extern "C" __global__ void my_silu_mul(
    const T* gate,  // (n)
    const T* up,    // (n)
    T* out,         // (n)
    long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = widen(gate[i]);
    out[i] = narrow(g / (1.0f + expf(-g)) * widen(up[i]));
}
