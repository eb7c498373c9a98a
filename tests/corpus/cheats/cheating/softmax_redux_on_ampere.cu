// launch: grid=ceil(rows / 4) block=128
__device__ int ordered(float f) { const int b = __float_as_int(f); return b ^ ((b >> 31) & 0x7fffffff); }

__device__ float warp_max(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const int k = __reduce_max_sync(0xffffffffu, ordered(v));
    return __int_as_float(k ^ ((k >> 31) & 0x7fffffff));
#else
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
#endif
}
extern "C" __global__ void softmax_redux(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += (long long)row * n;
    y += (long long)row * n;
    float m = -INFINITY, s = 0.f;
    for (int i = lane; i < n; i += 32) m = fmaxf(m, x[i]);
    m = warp_max(m);
    for (int i = lane; i < n; i += 32) s += expf(x[i] - m);
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
    for (int i = lane; i < n; i += 32) y[i] = expf(x[i] - m) / s;
}
