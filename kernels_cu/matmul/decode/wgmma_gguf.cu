// The products of matmul/decode/wgmma.cu with GGUF weights, for many rows of decoding on Hopper:
//
//   decode_wgmma_gguf: GGUF weights by wgmma, with the same bits as decode_mma_gguf, x rounded to one float16 term.
//       out = [residual +] [gelu] (x W^T + bias), or with DECODE_GATED, for two matrices, out = silu(x W^T) (x U^T)
//   decode_wgmma_gguf (qkv_gguf_wgmma): EPILOGUE_APPEND stores q in an array, k and v in the KV cache
//   decode_wgmma_gguf (rope_gguf_wgmma): EPILOGUE_APPEND_ROPE rotates q and k before it stores them
//
// lib/decode/wgmma_gguf.cuh multiplies the GGUF blocks. With OPERAND_SUMS, a product with DECODE_GATED also stores the
// sums of chunks of its outputs (lib/chunk_sums.cuh).
//
// Any M and N; K is a multiple of 128; the columns of a thread block have one GGUF type.
//
// architecture: sm_90a
#define WEIGHT_GGUF 1
#ifndef OPERAND_TERMS
#define OPERAND_TERMS 1
#endif
#include "lib/decode/wgmma_tile.cuh"

static_assert(OPERAND_TERMS == 1, "x is rounded");

// Launched by operation (variant): linear (gguf_wgmma), linear_qkv (qkv_gguf_wgmma), linear_rope (rope_gguf_wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_wgmma_gguf(
    const float* x,                  // (M, K), stored as 16-bit terms
    const W* w,                      // (N, K), GGUF blocks
    const W* up,                     // (N, K), GGUF blocks, with DECODE_GATED
    const float* chunk_sums,         // (M, K / 32): sums of x (lib/chunk_sums.cuh), or null
    const float* __restrict__ bias,  // (N) or null
    const float* residual,           // (M, N) or null; may be out
    float* out,                      // (M, N), also as an operand with sums; with a KV cache only q
    const float* rotations,          // (M, DECODE_ROPE / 2, 2), with DECODE_ROPE
    const int* row,                  // (M)
    const int* position,             // (M)
    KV* k_cache,                     // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    KV* v_cache,                     // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    int M, int N, int K, int gelu, int C, int n_head, int n_kv_head, int B, int n_ctx) {
    const Scales scales{nullptr, nullptr, bias};
#if EPILOGUE == EPILOGUE_APPEND_ROPE
    const AppendRopeTwo end{{rotations, out, k_cache, v_cache, row, position, n_head, n_kv_head, B, n_ctx}};
    run(x, {w, nullptr, chunk_sums}, scales, end, M, N / 2, K);
#elif EPILOGUE == EPILOGUE_APPEND
    const AppendTwo end{{out, k_cache, v_cache, row, position, C, B, n_ctx}};
    run(x, {w, nullptr, chunk_sums}, scales, end, M, N, K);
#elif DECODE_OUT_OPERAND
    run(x, {w, up, chunk_sums}, scales, AddOperand{{{residual, out, N, gelu}}, M}, M, N, K);
#else
    run(x, {w, up, chunk_sums}, scales, AddTwo{{residual, out, N, gelu}}, M, N, K);
#endif
}
