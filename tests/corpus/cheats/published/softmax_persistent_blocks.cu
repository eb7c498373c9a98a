// launch: grid=min(rows, 64) block=192
__device__ __forceinline__ float warp_max(float v) {
    for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}
__device__ __forceinline__ float warp_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

extern "C" __global__ void __launch_bounds__(192) softmax_loop(const float* __restrict__ x, float* __restrict__ y, int rows, int n) {
    __shared__ float tops[6], sums[6];
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const float* in = x + (size_t)row * n;
        float m = -INFINITY;
        for (int i = threadIdx.x; i < n; i += 192) m = fmaxf(m, __ldg(in + i));
        m = warp_max(m);
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = m;
        __syncthreads();
        for (int w = 0; w < 6; ++w) m = fmaxf(m, tops[w]);
        float s = 0.f;
        for (int i = threadIdx.x; i < n; i += 192) s += __expf(__ldg(in + i) - m);
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = s;
        __syncthreads();
        s = 0.f;
        for (int w = 0; w < 6; ++w) s += sums[w];
        for (int i = threadIdx.x; i < n; i += 192) __stcs(y + (size_t)row * n + i, __expf(__ldg(in + i) - m) / s);
    }
}
