// The square of ReLU: y = max(x, 0)^2, the activation of nanochat's feed-forward.
//
//   relu_squared: one thread per element; launches may overlap
//
// grid (ceil(n / block)), block (any). Source: So et al., "Primer: Searching for Efficient Transformers" (2021).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

// Launched by operation (variant): relu_squared (relu squared)
extern "C" __global__ void relu_squared(const float* x,  // (n)
                                        float* y,        // (n); may be x
                                        long long n) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __ldcg(x + i);
    y[i] = v < 0.0f ? 0.0f : v * v;  // NaN stays NaN
}
