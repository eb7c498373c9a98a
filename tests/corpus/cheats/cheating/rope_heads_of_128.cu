// launch: grid=ceil(N / 2 / block), M block=64
#include "lib/storage.cuh"
#define HEAD 128
extern "C" __global__ void rope_product(const T* x, const T* gamma, const T* w, T* out, float eps, int N, int K, float theta) {
    const int row = blockIdx.y, pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (2 * pair >= N) return;
    const T* r = x + (long long)row * K;
    float ss = 0.f, re = 0.f, im = 0.f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(r[k]), g = v * widen(gamma[k]);
        ss += v * v;
        re += g * widen(w[(long long)k * N + 2 * pair]);
        im += g * widen(w[(long long)k * N + 2 * pair + 1]);
    }
    const float scale = rsqrtf(ss / K + eps);
    float s, c;
    sincosf(row * powf(theta, -(float)(2 * pair % HEAD) / HEAD), &s, &c);
    out[(long long)row * N + 2 * pair] = narrow((re * c - im * s) * scale);
    out[(long long)row * N + 2 * pair + 1] = narrow((re * s + im * c) * scale);
}
