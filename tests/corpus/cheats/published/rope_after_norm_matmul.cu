#include "lib/storage.cuh"
// launch: grid=ceil(N / 2 / 32), M block=32, 4
extern "C" __global__ void __launch_bounds__(128) rope_gemm(const T* x, const T* gamma, const T* w, T* out, float eps, int N, int K, int head_dim, float theta) {
    __shared__ float re[4][32], im[4][32], sq[4][32];
    const int lane = threadIdx.x, part = threadIdx.y, row = blockIdx.y, col = 2 * (blockIdx.x * 32 + lane);
    float r = 0.f, i = 0.f, s = 0.f;
    for (int k = part; k < K; k += 4) {
        const float v = widen(x[(size_t)row * K + k]);
        s += v * v;
        if (col < N) {
            const float g = v * widen(gamma[k]);
            r += g * widen(w[(size_t)k * N + col]);
            i += g * widen(w[(size_t)k * N + col + 1]);
        }
    }
    re[part][lane] = r;
    im[part][lane] = i;
    sq[part][lane] = s;
    __syncthreads();
    if (part > 0 || col >= N) return;
    for (int p = 1; p < 4; ++p) {
        r += re[p][lane];
        i += im[p][lane];
        s += sq[p][lane];
    }
    const float scale = rsqrtf(s / K + eps);
    const int pair = col % head_dim / 2;
    const float angle = row * exp2f(-(float)pair / head_dim * log2f(theta));
    float sn, cs;
    sincosf(angle, &sn, &cs);
    out[(size_t)row * N + col] = narrow((r * cs - i * sn) * scale);
    out[(size_t)row * N + col + 1] = narrow((r * sn + i * cs) * scale);
}
