// launch: grid=min(rows, 1024) block=256
extern "C" __global__ void softmax_rows(const float* __restrict__ x, float* __restrict__ y, int rows, int n) {
    __shared__ float part[8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long base = (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x) m = fmaxf(m, x[base + i]);
    for (int o = 16; o > 0; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    if (lane == 0) part[warp] = m;
    __syncthreads();
    m = part[0];
    for (int w = 1; w < 8; ++w) m = fmaxf(m, part[w]);
    __syncthreads();
    float s = 0.f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s += expf(x[base + i] - m);
    for (int o = 16; o > 0; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (lane == 0) part[warp] = s;
    __syncthreads();
    s = 0.f;
    for (int w = 0; w < 8; ++w) s += part[w];
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[base + i] = expf(x[base + i] - m) / s;
}
