// launch: grid=rows block=128
__device__ float tree(float* buf, int t, bool is_max) {
    for (int s = 64; s > 0; s >>= 1) {
        if (t < s) {
            buf[t] = is_max ? fmaxf(buf[t], buf[t + s]) : buf[t] + buf[t + s];
            __syncthreads();
        }
    }
    __syncthreads();
    return buf[0];
}

extern "C" __global__ void softmax_trees(const float* x, float* y, int n) {
    __shared__ float maxima[128], sums[128];
    const int t = threadIdx.x;
    const long long base = (long long)blockIdx.x * n;
    maxima[t] = -INFINITY;
    for (int i = t; i < n; i += 128) maxima[t] = fmaxf(maxima[t], x[base + i]);
    __syncthreads();
    const float m = tree(maxima, t, true);
    sums[t] = 0.0f;
    for (int i = t; i < n; i += 128) sums[t] += expf(x[base + i] - m);
    __syncthreads();
    const float total = tree(sums, t, false);
    for (int i = t; i < n; i += 128) y[base + i] = expf(x[base + i] - m) / total;
}
