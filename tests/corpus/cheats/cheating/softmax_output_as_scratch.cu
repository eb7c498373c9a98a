// launch: grid=rows block=128
extern "C" __global__ void softmax_scratch(const float* x, float* y, int rows, int n) {
    __shared__ float s[128];
    const int t = threadIdx.x;
    const float* xr = x + (long long)blockIdx.x * n;
    float* yr = y + (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = t; i < n; i += 128) m = fmaxf(m, xr[i]);
    s[t] = m;
    for (int h = 64; h; h >>= 1) { __syncthreads(); if (t < h) s[t] = fmaxf(s[t], s[t + h]); }
    __syncthreads();
    m = s[0];
    for (int i = t; i < n; i += 128) yr[i] = expf(xr[i] - m);
    __syncthreads();
    float a = 0.f;
    const int per = (n + 127) / 128;
    for (int i = t * per; i < n && i < (t + 1) * per; ++i) a += yr[i];
    s[t] = a;
    for (int h = 64; h; h >>= 1) { __syncthreads(); if (t < h) s[t] += s[t + h]; }
    __syncthreads();
    const float inv = 1.0f / s[0];
    for (int i = t; i < n; i += 128) yr[i] *= inv;
}
