// launch: grid=N block=256
__device__ float block_total(float v, float* slot) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if ((threadIdx.x & 31) == 0) slot[threadIdx.x >> 5] = v;
    __syncthreads();
    float t = 0.f;
    for (int w = 0; w < (int)(blockDim.x >> 5); ++w) t += slot[w];
    return t;
}
extern "C" __global__ void ln_block(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ float slot[32];
    const float* r = x + (long long)blockIdx.x * C;
    float s = 0.f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) s += r[c];
    const float mean = block_total(s, slot) / C;
    float q = 0.f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { const float d = r[c] - mean; q += d * d; }
    const float rstd = rsqrtf(block_total(q, slot) / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        out[(long long)blockIdx.x * C + c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
