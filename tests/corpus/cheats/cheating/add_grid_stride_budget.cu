// launch: grid=min(ceil(n / block), 512) block=256
extern "C" __global__ void add_strided(const float* a, const float* b, float* y, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    #pragma unroll 4
    for (int k = 0; k < 16; ++k, i += step)
        if (i < n) y[i] = a[i] + b[i];
}
