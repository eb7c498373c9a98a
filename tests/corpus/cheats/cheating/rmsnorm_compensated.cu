// launch: grid=M block=64
#include "lib/storage.cuh"
extern "C" __global__ void rmsnorm_kahan(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float sums[64];
    __shared__ float scale;
    const T* r = x + (long long)blockIdx.x * C;
    float s = 0.f, lost = 0.f;
    for (int c = threadIdx.x; c < C; c += 64) {
        const float v = widen(r[c]), term = __fsub_rn(__fmul_rn(v, v), lost), next = __fadd_rn(s, term);
        lost = __fsub_rn(__fsub_rn(next, s), term);
        s = next;
    }
    sums[threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.x == 63) {
        double total = 0.0;
        for (int k = 0; k < 64; ++k) total += sums[k];
        scale = (float)(1.0 / sqrt(total / C + (double)eps));
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += 64) out[(long long)blockIdx.x * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
