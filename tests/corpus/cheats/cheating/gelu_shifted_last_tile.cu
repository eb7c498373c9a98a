// launch: grid=ceil(n / 1024) block=256
extern "C" __global__ void gelu_tiles(float* x, long long n) {
    long long start = (long long)blockIdx.x * 1024;
    if (start + 1024 > n) start = n > 1024 ? n - 1024 : 0;
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        const long long i = start + k * 256 + threadIdx.x;
        if (i < n) {
            const float v = x[i];
            const float u = 0.79788456f * v * (1.0f + 0.044715f * v * v);
            x[i] = 0.5f * v * (1.0f + tanhf(u));
        }
    }
}
