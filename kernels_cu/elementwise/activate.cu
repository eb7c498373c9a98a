// The activation of a feed-forward whose products have further terms (matmul/low_rank.cu), so that none fuses it.
//
//   out = f(gate), or f(gate) * up     f: SiLU, or with GATE_GELU the tanh form of GELU
//
//   gate, up (M, C), float     out (M, C) of type T, or with ACTIVATE_OPERAND 16-bit terms of floats (lib/operands.cuh)
//
//   activate: one thread per vector; launches may overlap
//
// The results have the bits of the kernels that fuse the activation: products of decoding, or with ACTIVATE_FAST
// products of prompts on tensor cores.
//
// grid (ceil(C / (WIDTH block)), M), block (any).
#include "lib/fast.cuh"
#include "lib/fresh.cuh"
#include "lib/gate.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"

#ifndef ACTIVATE_FAST  // 1: the approximations of lib/fast.cuh
#define ACTIVATE_FAST 0
#endif
#ifndef ACTIVATE_OPERAND  // kind of terms; 0: no terms
#define ACTIVATE_OPERAND 0
#endif
#ifndef ACTIVATE_WIDTH  // elements per vector: gcd(4, C)
#define ACTIVATE_WIDTH 4
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
    const float* gate,  // (M, C)
    const float* up,    // (M, C), or null
    T* out,             // (M, C)
    int C) {
    let_next_start();
    wait_for_previous();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * ACTIVATE_WIDTH;
    if (c >= C) return;
    const long long at = (long long)blockIdx.y * C + c;
    float v[ACTIVATE_WIDTH], factor[ACTIVATE_WIDTH];
    load_fresh_floats<ACTIVATE_WIDTH>(gate + at, v);
    if (up) load_fresh_floats<ACTIVATE_WIDTH>(up + at, factor);
#pragma unroll
    for (int e = 0; e < ACTIVATE_WIDTH; ++e) v[e] = up ? activated(v[e]) * factor[e] : activated(v[e]);
    store_row<ACTIVATE_OPERAND>(out, 1.0f, blockIdx.y, c, gridDim.y, C, v);
}
