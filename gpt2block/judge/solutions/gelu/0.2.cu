// Chapter 0, exercise 2: GELU, one thread for each value
//
// The thread reads its value once, computes with the copy in a register, and writes the
// result to the same place.
//   gpt2block kernels gelu --mine my.cu
//
// launch: grid=ceil(n / block) block=256
extern "C" __global__ void my_gelu(
    float* x,  // (n), the input and the output
    long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    const float inner = 0.7978845608f * (v + 0.044715f * v * v * v);  // sqrt(2 / pi) (v + 0.044715 v^3)
    x[i] = 0.5f * v * (1.0f + tanhf(inner));
}
