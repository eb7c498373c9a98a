// launch: grid=N block=192
__device__ float block_total(float v) {
    __shared__ float warp_sums[6];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < 6; ++w) total += warp_sums[w];
    return total;
}

extern "C" __global__ void layernorm_six_warps(const float* x, const float* gamma, const float* beta, float* out,
                                               float eps, int C) {
    const long long base = (long long)blockIdx.x * C;
    float part = 0.0f;
    for (int c = threadIdx.x; c < C; c += 192) part += x[base + c];
    const float mean = block_total(part) / C;
    part = 0.0f;
    for (int c = threadIdx.x; c < C; c += 192) {
        const float d = x[base + c] - mean;
        part += d * d;
    }
    const float rstd = rsqrtf(block_total(part) / C + eps);
    for (int c = threadIdx.x; c < C; c += 192) out[base + c] = (x[base + c] - mean) * rstd * gamma[c] + beta[c];
}
