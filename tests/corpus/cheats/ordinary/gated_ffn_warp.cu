// launch: grid=ceil(N / 8), M block=256
#include "lib/storage.cuh"

__device__ float lanes_total(float v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

extern "C" __global__ void gated_ffn(const T* x, const T* gamma, const T* w1, const T* w3, T* out, float eps, int N,
                                     int K) {
    const int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const T* row = x + (long long)blockIdx.y * K;
    float squares = 0.0f, gate = 0.0f, up = 0.0f;
    for (int k = lane; k < K; k += 32) {
        const float v = widen(row[k]);
        squares += v * v;
        const float g = v * widen(gamma[k]);
        gate += g * widen(w1[(long long)n * K + k]);
        up += g * widen(w3[(long long)n * K + k]);
    }
    const float r = rsqrtf(lanes_total(squares) / K + eps);
    gate = lanes_total(gate) * r;
    up = lanes_total(up) * r;
    if (lane == 0) out[(long long)blockIdx.y * N + n] = narrow(gate / (1.0f + expf(-gate)) * up);
}
