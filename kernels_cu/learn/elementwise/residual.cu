// The residual connection: y = a + b.
//
//   add_kernel: one thread per element
//
// A step of LeetGPU's GPT-2 block challenge.

// launch: grid=ceil(n / block) block=256
extern "C" __global__ void add_kernel(const float* __restrict__ a,  // (n)
                                      const float* __restrict__ b,  // (n)
                                      float* __restrict__ y,        // (n)
                                      long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}
