// launch: grid=N block=256
extern "C" __global__ void ln_center(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ float s[256];
    const int t = threadIdx.x;
    float* r = const_cast<float*>(x) + (long long)blockIdx.x * C;
    float a = 0.f;
    for (int c = t; c < C; c += 256) a += r[c];
    s[t] = a;
    for (int h = 128; h; h >>= 1) { __syncthreads(); if (t < h) s[t] += s[t + h]; }
    __syncthreads();
    const float mean = s[0] / C;
    __syncthreads();
    a = 0.f;
    for (int c = t; c < C; c += 256) { const float d = r[c] - mean; r[c] = d; a += d * d; }
    s[t] = a;
    for (int h = 128; h; h >>= 1) { __syncthreads(); if (t < h) s[t] += s[t + h]; }
    __syncthreads();
    const float rstd = rsqrtf(s[0] / C + eps);
    for (int c = t; c < C; c += 256) out[(long long)blockIdx.x * C + c] = r[c] * rstd * gamma[c] + beta[c];
}
