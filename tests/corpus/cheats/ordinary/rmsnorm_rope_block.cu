// launch: grid=M block=128
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_rope(const T* x, const T* gamma, const T* w, T* out, float eps, int N, int K,
                                        int head_dim, float theta) {
    __shared__ float partial[128];
    const int row = blockIdx.x, t = threadIdx.x;
    const T* xr = x + (long long)row * K;
    float s = 0.0f;
    for (int k = t; k < K; k += 128) s += widen(xr[k]) * widen(xr[k]);
    partial[t] = s;
    __syncthreads();
    for (int h = 64; h; h >>= 1) {
        if (t < h) partial[t] += partial[t + h];
        __syncthreads();
    }
    const float scale = rsqrtf(partial[0] / K + eps);
    for (int pair = t; pair < N / 2; pair += 128) {
        const int c = pair * 2;
        float re = 0.0f, im = 0.0f;
        for (int k = 0; k < K; ++k) {
            const float v = widen(xr[k]) * widen(gamma[k]);
            re += v * widen(w[(long long)k * N + c]);
            im += v * widen(w[(long long)k * N + c + 1]);
        }
        re *= scale;
        im *= scale;
        float sn, cs;
        sincosf(row * powf(theta, -(float)(c % head_dim) / head_dim), &sn, &cs);
        out[(long long)row * N + c] = narrow(re * cs - im * sn);
        out[(long long)row * N + c + 1] = narrow(re * sn + im * cs);
    }
}
