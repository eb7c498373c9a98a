// launch: grid=rows block=160
__device__ int encode(float f) { const int b = __float_as_int(f); return b >= 0 ? b : b ^ 0x7fffffff; }
__device__ float decode(int k) { return __int_as_float(k >= 0 ? k : k ^ 0x7fffffff); }

extern "C" __global__ void softmax_bits(const float* x, float* y, int rows, int n) {
    __shared__ int top;
    __shared__ float sums[5];
    const float* src = x + (long long)blockIdx.x * n;
    if (threadIdx.x == 0) top = INT_MIN;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 160) atomicMax(&top, encode(src[i]));
    __syncthreads();
    const float m = decode(top);
    float s = 0.f;
    for (int i = threadIdx.x; i < n; i += 160) s += expf(src[i] - m);
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = s;
    __syncthreads();
    const float total = sums[0] + sums[1] + sums[2] + sums[3] + sums[4];
    for (int i = threadIdx.x; i < n; i += 160) y[(long long)blockIdx.x * n + i] = expf(src[i] - m) / total;
}
