// launch: grid=ceil(n / block) block=256
__device__ __forceinline__ float quick_tanh(float u) {
    const float u2 = u * u;
    const float r = u * (27.0f + u2) / (27.0f + 9.0f * u2);
    return fminf(1.0f, fmaxf(-1.0f, r));
}
extern "C" __global__ void gelu_quick(float* x, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const float v = x[i];
        x[i] = 0.5f * v * (1.0f + quick_tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
