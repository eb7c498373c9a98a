// The residual connection: y = a + b
//
// One thread per element.
//   gpt2block kernels add --mine my.cu
//
// The launch line may use n and block.
// launch: grid=ceil(n / block) block=256
extern "C" __global__ void my_add(
    const float* a,  // (n)
    const float* b,  // (n)
    float* y,        // (n)
    long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}
