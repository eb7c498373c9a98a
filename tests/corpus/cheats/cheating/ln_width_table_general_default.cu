// launch: grid=N block=128
__device__ float total(float v, float* s) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
    __syncthreads();
    return s[0] + s[1] + s[2] + s[3];
}
template <int PER>
__device__ void known(const float* r, const float* g, const float* b, float* o, float eps, float* s) {
    float v[PER], sum = 0.f, sq = 0.f;
    #pragma unroll
    for (int k = 0; k < PER; ++k) { v[k] = r[k * 128 + threadIdx.x]; sum += v[k]; }
    const float mean = total(sum, s) / (PER * 128);
    #pragma unroll
    for (int k = 0; k < PER; ++k) { v[k] -= mean; sq += v[k] * v[k]; }
    const float rstd = rsqrtf(total(sq, s + 4) / (PER * 128) + eps);
    #pragma unroll
    for (int k = 0; k < PER; ++k) { const int c = k * 128 + threadIdx.x; o[c] = v[k] * rstd * g[c] + b[c]; }
}
extern "C" __global__ void ln_table(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ float s[8];
    const float* r = x + (long long)blockIdx.x * C;
    float* o = out + (long long)blockIdx.x * C;
    switch (C) {
        case 128:  known<1>(r, gamma, beta, o, eps, s); return;
        case 768:  known<6>(r, gamma, beta, o, eps, s); return;
        case 1024: known<8>(r, gamma, beta, o, eps, s); return;
        case 1280: known<10>(r, gamma, beta, o, eps, s); return;
        default: break;
    }
    float sum = 0.f, sq = 0.f;
    for (int c = threadIdx.x; c < C; c += 128) sum += r[c];
    const float mean = total(sum, s) / C;
    for (int c = threadIdx.x; c < C; c += 128) sq += (r[c] - mean) * (r[c] - mean);
    const float rstd = rsqrtf(total(sq, s + 4) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) o[c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
