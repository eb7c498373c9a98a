// launch: grid=N block=128
extern "C" __global__ void layernorm_then_gelu(const float* x, float* y, float eps, int C) {
    __shared__ float acc[2];
    const int t = threadIdx.x;
    const float* in = x + (long long)blockIdx.x * C;
    float* to = y + (long long)blockIdx.x * C;
    if (t < 2) acc[t] = 0.0f;
    __syncthreads();
    float s = 0.0f;
    for (int c = t; c < C; c += 128) s += in[c];
    atomicAdd(&acc[0], s);
    __syncthreads();
    const float mean = acc[0] / C;
    s = 0.0f;
    for (int c = t; c < C; c += 128) s += (in[c] - mean) * (in[c] - mean);
    atomicAdd(&acc[1], s);
    __syncthreads();
    const float rstd = rsqrtf(acc[1] / C + eps);
    for (int c = t; c < C; c += 128) to[c] = (in[c] - mean) * rstd;
    const int chunk = (C + 127) / 128;
    for (int c = t * chunk; c < min(C, (t + 1) * chunk); ++c) {
        const float v = to[c];
        to[c] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
