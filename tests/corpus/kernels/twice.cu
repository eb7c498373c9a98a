// y = 2 x for n numbers.
//
//   twice_kernel: one thread per element.

// launch: grid=ceil(n / block) block=256
extern "C" __global__ void twice_kernel(const float* x,  // (n,)
                                        float* y,        // (n,)
                                        int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
}
