// Logits capped between -limit and limit: y = limit tanh(x / limit).
//
//   cap_logits: one thread per element; a logit of -infinity, which excludes a token, stays; launches may overlap
//
// grid (ceil(n / block)), block (any). Source: Gemma Team, "Gemma 2" (2024), "logit soft-capping".
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

// Launched by operation (variant): cap (cap)
extern "C" __global__ void cap_logits(const float* x,  // (n)
                                      float* y,        // (n); may be x
                                      float limit, long long n) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __ldcg(x + i);
    y[i] = isinf(v) && v < 0.0f ? v : limit * tanhf(v / limit);
}
