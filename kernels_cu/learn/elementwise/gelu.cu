// GELU in place, the tanh form: x <- 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
//
//   gelu_kernel: one thread per element
//
// A step of LeetGPU's GPT-2 block challenge.

// launch: grid=ceil(n / block) block=256
extern "C" __global__ void gelu_kernel(float* __restrict__ x,  // (n)
                                       long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    x[i] = 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}
