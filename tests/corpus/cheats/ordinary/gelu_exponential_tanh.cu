// tanh(u) = (exp(2u) - 1) / (exp(2u) + 1), cheaper than tanhf.
// launch: grid=ceil(n / block) block=256
__device__ inline float fast_tanh(float u) {
    float e = expf(2.0f * u);
    return (e - 1.0f) / (e + 1.0f);
}

extern "C" __global__ void gelu_fast(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    x[i] = 0.5f * v * (1.0f + fast_tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
}
