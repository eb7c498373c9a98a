// launch: grid=rows block=64
__device__ float pow2(float t) {
    t = fmaxf(t, -126.0f);
    const float whole = floorf(t), f = t - whole;
    const float m = 1.0f + f * (0.6565f + f * 0.3435f);
    return __int_as_float(((int)whole + 127) << 23) * m;
}
extern "C" __global__ void softmax_pow2(const float* x, float* y, int rows, int n) {
    const float* p = x + (long long)blockIdx.x * n;
    float* q = y + (long long)blockIdx.x * n;
    __shared__ float hi[2], tot[2];
    float m = -INFINITY, s = 0.0f;
    for (int i = threadIdx.x; i < n; i += 64) m = fmaxf(m, p[i]);
    for (int o = 16; o; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, o));
    if (threadIdx.x % 32 == 0) hi[threadIdx.x / 32] = m;
    __syncthreads();
    m = fmaxf(hi[0], hi[1]);
    for (int i = threadIdx.x; i < n; i += 64) s += pow2((p[i] - m) * 1.44269504f);
    for (int o = 16; o; o /= 2) s += __shfl_xor_sync(0xffffffff, s, o);
    if (threadIdx.x % 32 == 0) tot[threadIdx.x / 32] = s;
    __syncthreads();
    const float inv = 1.0f / (tot[0] + tot[1]);
    for (int i = threadIdx.x; i < n; i += 64) q[i] = pow2((p[i] - m) * 1.44269504f) * inv;
}
