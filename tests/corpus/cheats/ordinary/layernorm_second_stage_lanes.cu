// launch: grid=N block=256
__device__ float sum_over_block(float v, float* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
    if (lane == 0) shared[warp] = v;
    __syncthreads();
    v = shared[lane];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffff, v, o);
    __syncthreads();
    return v;
}

extern "C" __global__ void layernorm_two_level(const float* x, const float* gamma, const float* beta, float* out,
                                               float eps, int N, int C) {
    __shared__ float shared[32];
    const float* in = x + (long long)blockIdx.x * C;
    float v = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) v += in[c];
    const float mean = sum_over_block(v, shared) / C;
    v = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) v += (in[c] - mean) * (in[c] - mean);
    const float rstd = rsqrtf(sum_over_block(v, shared) / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        out[(long long)blockIdx.x * C + c] = (in[c] - mean) * rstd * gamma[c] + beta[c];
}
