// GELU in place: x = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
//
// One thread per element.
//   gpt2block kernels gelu --mine my.cu
//
// The launch line may use n and block.
// launch: grid=ceil(n / block) block=256
extern "C" __global__ void my_gelu(
    float* x,  // (n), the input and the output
    long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    x[i] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
}
