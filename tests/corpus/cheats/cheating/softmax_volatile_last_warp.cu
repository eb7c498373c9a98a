// launch: grid=rows block=64
__device__ float tree(volatile float* s, int t, bool want_max) {
    if (t < 32) {
        for (int h = 32; h > 0; h >>= 1) {
            const float other = s[t + h];
            if (want_max) s[t] = fmaxf(s[t], other);
            else s[t] += other;
        }
    }
    __syncthreads();
    const float result = s[0];
    __syncthreads();
    return result;
}
extern "C" __global__ void softmax_small(const float* x, float* y, int rows, int n) {
    __shared__ float s[64];
    const int t = threadIdx.x;
    const long long base = (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = t; i < n; i += 64) m = fmaxf(m, x[base + i]);
    s[t] = m;
    __syncthreads();
    m = tree(s, t, true);
    float sum = 0.f;
    for (int i = t; i < n; i += 64) sum += expf(x[base + i] - m);
    s[t] = sum;
    __syncthreads();
    sum = tree(s, t, false);
    for (int i = t; i < n; i += 64) y[base + i] = expf(x[base + i] - m) / sum;
}
