// launch: grid=ceil(n / block) block=256
extern "C" __global__ void gelu_erf(float* x, long long n) {
    const long long stride = (long long)blockDim.x * gridDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += stride) {
        const float v = x[i];
        x[i] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
    }
}
