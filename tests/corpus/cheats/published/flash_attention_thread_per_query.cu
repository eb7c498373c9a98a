#include "lib/storage.cuh"
// launch: grid=ceil(T / 64), NH, B block=64
extern "C" __global__ void __launch_bounds__(64) flash_f32(const T* __restrict__ qkv, T* __restrict__ out, int seq_len, int n_head, int HS) {
    constexpr int D = 64, BC = 32;
    __shared__ float ks[BC][D], vs[BC][D];
    const int i = blockIdx.x * 64 + threadIdx.x, C = n_head * D;
    const T* base = qkv + blockIdx.z * (size_t)seq_len * 3 * C + blockIdx.y * D;
    const float scale = 0.125f, log2e = 1.4426950408889634f;
    float q[D], o[D], m = -INFINITY, l = 0.0f;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        q[d] = i < seq_len ? widen(base[(size_t)i * 3 * C + d]) * scale : 0.0f;
        o[d] = 0.0f;
    }
    const int last = min(seq_len, (int)(blockIdx.x + 1) * 64);
    for (int j0 = 0; j0 < last; j0 += BC) {
        for (int e = threadIdx.x; e < BC * D; e += 64) {
            const int j = e / D, d = e % D;
            const bool in = j0 + j < seq_len;
            const T* row = base + (size_t)(j0 + j) * 3 * C;
            ks[j][d] = in ? widen(row[C + d]) : 0.0f;
            vs[j][d] = in ? widen(row[2 * C + d]) : 0.0f;
        }
        __syncthreads();
        for (int j = 0; j < BC && j0 + j <= i; ++j) {
            float s = 0.0f;
#pragma unroll
            for (int d = 0; d < D; ++d) s = fmaf(q[d], ks[j][d], s);
            const float top = fmaxf(m, s), alpha = exp2f((m - top) * log2e), p = exp2f((s - top) * log2e);
            l = l * alpha + p;
#pragma unroll
            for (int d = 0; d < D; ++d) o[d] = fmaf(o[d], alpha, p * vs[j][d]);
            m = top;
        }
        __syncthreads();
    }
    if (i < seq_len)
#pragma unroll
        for (int d = 0; d < D; ++d) out[(blockIdx.z * (size_t)seq_len + i) * C + blockIdx.y * D + d] = narrow(o[d] / l);
}
