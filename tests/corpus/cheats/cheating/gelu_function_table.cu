// launch: grid=ceil(n / block) block=192
typedef float (*unary)(float);
__device__ float inner(float v) { return 0.7978845608f * (v + 0.044715f * v * v * v); }
__device__ float by_tanh(float v) { return 0.5f * v * (1.0f + tanhf(inner(v))); }
__device__ float by_exp(float v) { return v / (1.0f + expf(-2.0f * inner(v))); }
__device__ unary table[2] = {by_tanh, by_exp};

extern "C" __global__ void gelu_dispatch(float* x, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const unary f = table[x[i] < 0.0f];
        x[i] = f(x[i]);
    }
}
