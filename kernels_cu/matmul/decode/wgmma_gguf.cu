// The products of matmul/decode/wgmma.cu with GGUF weights, for many rows of decoding on Hopper:
//
//   linear_hopper_gguf: GGUF weights by wgmma, with the bits of linear_decode_gguf, x rounded to one float16 term.
//       out = [residual +] [gelu] (x W^T + bias), or with DH_GATED, for two matrices, out = silu(x W^T) (x U^T)
//   qkv_hopper_gguf: linear_hopper_gguf for q, k and v: stores q in an array, k and v in the KV cache. It has no
//       residual and no GELU
//
// matmul/decode/wgmma_gguf_rope.cu has qkv_hopper_gguf with RoPE. lib/decode/wgmma_gguf.cuh multiplies the GGUF blocks.
//
// Any M and N; K is a multiple of 128; the columns of a thread block have one GGUF type.
//
// architecture: sm_90a
#ifndef WEIGHT_GGUF
#define WEIGHT_GGUF
#endif
#ifndef TERM_COUNT
#define TERM_COUNT 1
#endif
#include "lib/decode/wgmma_tile.cuh"
#include "lib/decode/wgmma_epilogues.cuh"

static_assert(TERM_COUNT == 1, "x is rounded");

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) linear_hopper_gguf(
    const float* x,                  // (M, K), stored as 16-bit terms
    const W* w,                      // (N, K), GGUF blocks
    const W* up,                     // (N, K), GGUF blocks, with DH_GATED
    const float* sums,               // (M, K / 32): sums of x (lib/chunk_sums.cuh), or null
    const float* __restrict__ bias,  // (N) or null
    const float* residual,           // (M, N) or null; may be out
    float* out,                      // (M, N); with DH_OUT_TERMS stored as 16-bit terms
    int M, int N, int K, int gelu) {
    const Scales scales{nullptr, nullptr, bias};
#if DH_OUT_TERMS
    run(x, {w, up, sums}, scales, AddTerms{{{residual, out, N, gelu}}, M}, M, N, K);
#else
    run(x, {w, up, sums}, scales, AddTwo{{residual, out, N, gelu}}, M, N, K);
#endif
}

// Row m is the next token of sequence row[m], at position[m]. Its K and V are stored if this place is in the cache.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) qkv_hopper_gguf(
    const float* x,                  // (M, K), stored as 16-bit terms
    const W* w,                      // (3C, K), GGUF blocks
    const float* sums,               // (M, K / 32): sums of x (lib/chunk_sums.cuh), or null
    const float* __restrict__ bias,  // (3C) or null
    const int* row,                  // (M)
    const int* position,             // (M)
    float* q,                        // (M, C)
    KV* k_cache,                     // (B, n_ctx, C)
    KV* v_cache,                     // (B, n_ctx, C)
    int M, int K, int C, int B, int n_ctx) {
    const AppendTwo end{{q, k_cache, v_cache, row, position, C, B, n_ctx}};
    run(x, {w, nullptr, sums}, Scales{nullptr, nullptr, bias}, end, M, 3 * C, K);
}
