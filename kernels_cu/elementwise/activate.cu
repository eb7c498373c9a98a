// The activation of a feed-forward whose products have further terms (matmul/low_rank.cu), so that none fuses it.
//
//   out = f(gate), or f(gate) * up     f: SiLU, or with GATE_GELU the tanh form of GELU
//
//   gate, up (n), float     out (n) of type T
//
//   activate: one thread per element; launches may overlap
//
// The results have the bits of the kernels that fuse the activation: products of decoding, or with ACTIVATE_FAST
// products of prompts on tensor cores.
//
// grid (ceil(n / block)), block (any).
#include "lib/fast.cuh"
#include "lib/fresh.cuh"
#include "lib/gate.cuh"
#include "lib/overlap.cuh"

#ifndef ACTIVATE_FAST  // 1: the approximations of lib/fast.cuh
#define ACTIVATE_FAST 0
#endif

__device__ __forceinline__ float activated(float v) {
#if !ACTIVATE_FAST
    return gate_of(v);
#elif defined(GATE_GELU)
    return gelu_fast(v);
#else
    return silu_fast(v);
#endif
}

// Launched by operation (variant): activate (activate)
extern "C" __global__ void activate(
    const float* gate,  // (n)
    const float* up,    // (n), or null
    T* out,             // (n); may be gate or up if it is float
    long long n) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = activated(__ldcg(gate + i));
    out[i] = narrow(up ? v * __ldcg(up + i) : v);
}
