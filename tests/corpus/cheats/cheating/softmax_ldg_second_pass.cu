// launch: grid=rows block=256
extern "C" __global__ void softmax_two_pass(const float* x, float* y, int rows, int n) {
    __shared__ float red[8];
    const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
    const float* xr = x + (long long)blockIdx.x * n;
    float* yr = y + (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = threadIdx.x; i < n; i += 256) m = fmaxf(m, xr[i]);
    for (int o = 16; o; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, o));
    if (!lane) red[w] = m;
    __syncthreads();
    for (int k = 0; k < 8; ++k) m = fmaxf(m, red[k]);
    for (int i = threadIdx.x; i < n; i += 256) yr[i] = expf(xr[i] - m);
    __syncthreads();
    float s = 0.0f;
    for (int i = n - 1 - (int)threadIdx.x; i >= 0; i -= 256) s += __ldg(yr + i);
    for (int o = 16; o; o /= 2) s += __shfl_xor_sync(0xffffffff, s, o);
    if (!lane) red[w] = s;
    __syncthreads();
    s = 0.0f;
    for (int k = 0; k < 8; ++k) s += red[k];
    for (int i = threadIdx.x; i < n; i += 256) yr[i] = yr[i] / s;
}
