// launch: grid=ceil(N / 8) block=16, 8
extern "C" __global__ void layernorm_gelu_half_warp(const float* x, float* y, float eps, int N, int C) {
    const int wanted = blockIdx.x * 8 + threadIdx.y;
    const int row = wanted < N ? wanted : N - 1;
    const float* in = x + (long long)row * C;
    float s = 0.0f;
    for (int c = threadIdx.x; c < C; c += 16) s += in[c];
    for (int o = 8; o > 0; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o, 16);
    const float mean = s / C;
    float q = 0.0f;
    for (int c = threadIdx.x; c < C; c += 16) q += (in[c] - mean) * (in[c] - mean);
    for (int o = 8; o > 0; o >>= 1) q += __shfl_xor_sync(0xffffffffu, q, o, 16);
    const float rstd = rsqrtf(q / C + eps);
    if (wanted >= N) return;
    for (int c = threadIdx.x; c < C; c += 16) {
        const float v = (in[c] - mean) * rstd;
        y[(long long)row * C + c] = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
    }
}
