// launch: grid=N block=1024
__device__ float sum_1024(float v, float* s) {
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
    if ((threadIdx.x & 31) == 0) s[threadIdx.x >> 5] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = s[threadIdx.x];
        for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
        if (threadIdx.x == 0) s[32] = v;
    }
    __syncthreads();
    return s[32];
}
extern "C" __global__ void __launch_bounds__(1024) ln_wide(const float* x, const float* gamma, const float* beta, float* out,
                                                           float eps, int N, int C) {
    __shared__ float s[2][33];
    const float* r = x + (long long)blockIdx.x * C;
    float a = 0.f, q = 0.f;
    for (int c = threadIdx.x; c < C; c += 1024) a += r[c];
    const float mean = sum_1024(a, s[0]) / C;
    for (int c = threadIdx.x; c < C; c += 1024) { const float d = r[c] - mean; q += d * d; }
    const float rstd = 1.0f / sqrtf(sum_1024(q, s[1]) / C + eps);
    for (int c = threadIdx.x; c < C; c += 1024) out[(long long)blockIdx.x * C + c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
