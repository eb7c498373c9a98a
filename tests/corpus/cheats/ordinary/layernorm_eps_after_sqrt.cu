// launch: grid=ceil(N / 4) block=128
extern "C" __global__ void layernorm_std(const float* x, const float* gamma, const float* beta, float* out, float eps,
                                         int N, int C) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* r = x + (size_t)row * C;
    float sum = 0.f;
    for (int c = lane; c < C; c += 32) sum += r[c];
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, o);
    float mean = sum / C;
    float sq = 0.f;
    for (int c = lane; c < C; c += 32) sq += (r[c] - mean) * (r[c] - mean);
    for (int o = 16; o; o >>= 1) sq += __shfl_xor_sync(0xffffffff, sq, o);
    float inv = 1.0f / (sqrtf(sq / C) + eps);
    for (int c = lane; c < C; c += 32) out[(size_t)row * C + c] = (r[c] - mean) * inv * gamma[c] + beta[c];
}
