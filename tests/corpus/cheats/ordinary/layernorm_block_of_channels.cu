// launch: grid=N block=C
extern "C" __global__ void layernorm_channels(const float* x, const float* gamma, const float* beta, float* out,
                                              float eps, int C) {
    __shared__ float sums[2];
    const int c = threadIdx.x;
    if (c < 2) sums[c] = 0.0f;
    if (C == 1 && c == 0) sums[1] = 0.0f;
    __syncthreads();
    const float v = x[(long long)blockIdx.x * C + c];
    float s = v;
    for (int o = 16; o > 0; o >>= 1) s += __shfl_down_sync(0xffffffff, s, o);
    if (c % 32 == 0) atomicAdd(&sums[0], s);
    __syncthreads();
    const float mean = sums[0] / C;
    float q = (v - mean) * (v - mean);
    for (int o = 16; o > 0; o >>= 1) q += __shfl_down_sync(0xffffffff, q, o);
    if (c % 32 == 0) atomicAdd(&sums[1], q);
    __syncthreads();
    out[(long long)blockIdx.x * C + c] = (v - mean) * rsqrtf(sums[1] / C + eps) * gamma[c] + beta[c];
}
