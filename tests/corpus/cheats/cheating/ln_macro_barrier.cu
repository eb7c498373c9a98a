// launch: grid=N block=256
#define __syncthreads() ((void)0)
extern "C" __global__ void ln_tree(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ float buf[256];
    const int t = threadIdx.x;
    const float* r = x + (long long)blockIdx.x * C;
    float v = 0.f;
    for (int c = t; c < C; c += 256) v += r[c];
    buf[t] = v;
    __syncthreads();
    for (int h = 128; h; h >>= 1) { if (t < h) buf[t] += buf[t + h]; __syncthreads(); }
    const float mean = buf[0] / C;
    __syncthreads();
    v = 0.f;
    for (int c = t; c < C; c += 256) v += (r[c] - mean) * (r[c] - mean);
    buf[t] = v;
    __syncthreads();
    for (int h = 128; h; h >>= 1) { if (t < h) buf[t] += buf[t + h]; __syncthreads(); }
    const float rstd = rsqrtf(buf[0] / C + eps);
    for (int c = t; c < C; c += 256) out[(long long)blockIdx.x * C + c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
