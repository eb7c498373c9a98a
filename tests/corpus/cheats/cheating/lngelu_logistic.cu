// launch: grid=N block=128
extern "C" __global__ void lngelu_block(const float* x, float* y, float eps, int N, int C) {
    __shared__ float s[128];
    const int t = threadIdx.x;
    const float* r = x + (long long)blockIdx.x * C;
    float a = 0.f;
    for (int c = t; c < C; c += 128) a += r[c];
    s[t] = a; __syncthreads();
    for (int k = 64; k; k >>= 1) { if (t < k) s[t] += s[t + k]; __syncthreads(); }
    const float mu = s[0] / C; __syncthreads();
    a = 0.f;
    for (int c = t; c < C; c += 128) a += (r[c] - mu) * (r[c] - mu);
    s[t] = a; __syncthreads();
    for (int k = 64; k; k >>= 1) { if (t < k) s[t] += s[t + k]; __syncthreads(); }
    const float rs = rsqrtf(s[0] / C + eps);
    for (int c = t; c < C; c += 128) {
        const float v = (r[c] - mu) * rs;
        y[(long long)blockIdx.x * C + c] = v / (1.f + expf(-1.702f * v));
    }
}
