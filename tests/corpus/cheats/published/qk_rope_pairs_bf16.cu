#include "lib/storage.cuh"
// launch: grid=ceil(N / 2 / block), M block=64
struct Two { float first, second; };
__device__ __forceinline__ Two load_pair(const T* p) {
    if (sizeof(T) != 2) return {widen(p[0]), widen(p[1])};
    const unsigned v = __ldg(reinterpret_cast<const unsigned*>(p));
    return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}

extern "C" __global__ void __launch_bounds__(64) norm_matmul_rope(const T* x, const T* gamma, const T* w, T* out, float eps,
                                                                 int N, int K, int head_dim, float theta) {
    __shared__ float part[2];
    const T* row = x + (size_t)blockIdx.y * K;
    float ss = 0.0f;
    for (int k = threadIdx.x; k < K; k += 64) ss += widen(row[k]) * widen(row[k]);
    for (int d = 16; d; d /= 2) ss += __shfl_xor_sync(~0u, ss, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = ss;
    __syncthreads();
    const float scale = rsqrtf((part[0] + part[1]) / K + eps);

    const int col = 2 * (blockIdx.x * 64 + threadIdx.x);
    if (col >= N) return;
    float r = 0.0f, i = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(row[k]) * widen(gamma[k]);
        const Two two = load_pair(w + (size_t)k * N + col);
        r = fmaf(v, two.first, r);
        i = fmaf(v, two.second, i);
    }
    r *= scale;
    i *= scale;
    float sn, cs;
    sincosf((float)blockIdx.y * powf(theta, -(float)(col % head_dim) / head_dim), &sn, &cs);
    out[(size_t)blockIdx.y * N + col] = narrow(r * cs - i * sn);
    out[(size_t)blockIdx.y * N + col + 1] = narrow(r * sn + i * cs);
}
