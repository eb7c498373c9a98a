// launch: grid=ceil(n / 185) block=37
extern "C" __global__ void gelu_37(float* x, long long n) {
    const long long end = min(n, (blockIdx.x + 1LL) * 185LL);
    for (long long i = blockIdx.x * 185LL + threadIdx.x; i < end; i += 37) {
        const float v = x[i];
        const float u = 0.79788456080286536f * (v + 0.044715f * v * v * v);
        x[i] = 0.5f * v * (1.0f + tanhf(u));
    }
}
