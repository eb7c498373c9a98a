// launch: grid=ceil(N * C / block) block=256
extern "C" __global__ void ln_flat(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)N * C) return;
    const unsigned int magic = ((1u << 20) + C - 1) / C;
    unsigned int row = (i * magic) >> 20;
    if (row >= N) row = N - 1;
    const float* r = x + (size_t)row * C;
    float mean = 0.f, var = 0.f;
    for (int c = 0; c < C; ++c) mean += r[c];
    mean /= C;
    for (int c = 0; c < C; ++c) var += (r[c] - mean) * (r[c] - mean);
    const unsigned int c = i % C;
    out[i] = (x[i] - mean) * rsqrtf(var / C + eps) * gamma[c] + beta[c];
}
