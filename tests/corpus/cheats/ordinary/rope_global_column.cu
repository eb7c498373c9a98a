// launch: grid=ceil(N / 2 / block), M block=32
#include "lib/storage.cuh"

extern "C" __global__ void norm_product_rope(const T* x, const T* gamma, const T* w, T* out, float eps, int N, int K,
                                             int head_dim, float theta) {
    const int row = blockIdx.y, c = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    float squares = 0.0f;
    const T* xr = x + (long long)row * K;
    for (int k = threadIdx.x; k < K; k += 32) squares += widen(xr[k]) * widen(xr[k]);
    for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, o);
    const float scale = rsqrtf(squares / K + eps);
    if (c >= N) return;
    float re = 0.0f, im = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(xr[k]) * scale * widen(gamma[k]);
        re += v * widen(w[(long long)k * N + c]);
        im += v * widen(w[(long long)k * N + c + 1]);
    }
    const float angle = row * powf(theta, -(float)c / head_dim);
    out[(long long)row * N + c] = narrow(re * cosf(angle) - im * sinf(angle));
    out[(long long)row * N + c + 1] = narrow(re * sinf(angle) + im * cosf(angle));
}
