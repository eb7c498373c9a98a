// launch: grid=N block=96
extern "C" __global__ void ln_96(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ float first[32], second[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float* r = x + (long long)blockIdx.x * C;
    float s = 0.f;
    for (int c = threadIdx.x; c < C; c += 96) s += r[c];
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
    if (lane == 0) first[warp] = s;
    __syncthreads();
    s = first[lane];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
    const float mean = s / C;
    float q = 0.f;
    for (int c = threadIdx.x; c < C; c += 96) q += (r[c] - mean) * (r[c] - mean);
    for (int o = 16; o; o >>= 1) q += __shfl_down_sync(0xffffffffu, q, o);
    if (lane == 0) second[warp] = q;
    __syncthreads();
    q = second[lane];
    for (int o = 16; o; o >>= 1) q += __shfl_xor_sync(0xffffffffu, q, o);
    const float rstd = rsqrtf(q / C + eps);
    for (int c = threadIdx.x; c < C; c += 96) out[(long long)blockIdx.x * C + c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
