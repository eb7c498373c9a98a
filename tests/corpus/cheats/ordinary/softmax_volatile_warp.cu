// launch: grid=rows block=64
__device__ void last_warp_sum(volatile float* s, int t) {
    s[t] += s[t + 32];
    s[t] += s[t + 16];
    s[t] += s[t + 8];
    s[t] += s[t + 4];
    s[t] += s[t + 2];
    s[t] += s[t + 1];
}

extern "C" __global__ void softmax_volatile(const float* x, float* y, int n) {
    __shared__ float s[64];
    __shared__ float m[64];
    const int t = threadIdx.x;
    const float* in = x + (size_t)blockIdx.x * n;
    m[t] = -INFINITY;
    for (int i = t; i < n; i += 64) m[t] = fmaxf(m[t], in[i]);
    __syncthreads();
    for (int h = 32; h > 0; h >>= 1) {
        if (t < h) m[t] = fmaxf(m[t], m[t + h]);
        __syncthreads();
    }
    float sum = 0.0f;
    for (int i = t; i < n; i += 64) sum += expf(in[i] - m[0]);
    s[t] = sum;
    __syncthreads();
    if (t < 32) last_warp_sum(s, t);
    __syncthreads();
    for (int i = t; i < n; i += 64) y[(size_t)blockIdx.x * n + i] = expf(in[i] - m[0]) / s[0];
}
