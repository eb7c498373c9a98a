// launch: grid=N block=256
__device__ float block_sum(float v) {
    __shared__ float sums[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
    if (lane == 0) sums[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = lane < warps ? sums[lane] : 0.0f;
        for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
        if (lane == 0) sums[0] = v;
    }
    __syncthreads();
    const float total = sums[0];
    __syncthreads();
    return total;
}

extern "C" __global__ void layernorm_block(const float* x, const float* gamma, const float* beta, float* out,
                                           float* mean, float* rstd, float eps, int C) {
    const long long start = (long long)blockIdx.x * C;
    float acc = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) acc += x[start + c];
    const float mu = block_sum(acc) / C;

    acc = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        const float d = x[start + c] - mu;
        acc += d * d;
    }
    const float r = rsqrtf(block_sum(acc) / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x) out[start + c] = (x[start + c] - mu) * r * gamma[c] + beta[c];
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = mu;
        rstd[blockIdx.x] = r;
    }
}
