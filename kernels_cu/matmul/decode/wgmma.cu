// The products of decoding for weights that stream from memory: 64 rows read them once.
//
//   linear_decode_hopper: large matrices or many rows on Hopper, with the bits of linear_decode_mma: wgmma, x as terms.
//       out = [residual +] [gelu] (x W^T * scale + bias), or with DH_GATED, of two matrices
//       out = silu(x W^T * scale) (x U^T * up_scale)
//   qkv_decode_hopper: linear_decode_hopper, with k and v into the KV cache. q goes to an array; without residual and
//       GELU
//
// matmul/decode/wgmma_rope.cu has the latter with RoPE.
//
// The order of additions is that of lib/decode/order.cuh. W (N, K), of 16 bits or FP8, is the A of the products and
// goes through registers, where FP8 is converted. x (M, K) is B: its terms (lib/terms.cuh), which the kernel before has
// stored in the order in which wgmma reads them. They are two columns for each row, or with TERM_COUNT 1 one.
//
//   block        64 DH_GROUPS columns of the output, of up to DH_ROWS rows; with DH_SPLITS a share of K
//   last warp    requests slices of K, 128 bytes of each row of W: W through a tensor map, x as one piece of memory. It
//                requests W before the previous kernel has ended, as much as there is room for
//   warpgroup    64 columns. A warp has 16 rows of A; with DH_GATED, these are 8 of W and the same 8 of U
//
//   ring   [W | x] [W | x] [W | x] ...   full: a slice has arrived    empty: all warps are done with it
//
// With two blocks on a multiprocessor, one copies while the other begins, ends or waits. A cluster has DH_SHARES
// neighbouring tiles of columns, which read the same x: each block copies a part of a slice to all of them. Otherwise
// as much of x as of W would be read from the L2 cache. It has DH_SPLITS blocks for each tile, which exchange the sums
// of their splits: tile i of 16 columns by 4 rows is for block i % DH_SPLITS, which adds the splits in order.
//
// Any M and N; K is a multiple of 128. grid (DH_SHARES DH_SPLITS ceil(M / TERM_ROWS) ceil(N / (columns DH_SHARES))),
// block (128 DH_GROUPS + 32), or with three groups 512. gpt2block/ops/_linear_hopper.py chooses the constants and
// computes the dynamic shared memory.
//
// On an NVIDIA H200, float16 weights of Llama 7B, in microseconds, in brackets at the rate of a copy and for matmul/
// decode_mma.cu and decode_tiles.cu (1, 16 and 64 rows), before the epilogue was a loop:
//
//   4096 -> 12288         24.0   26.3   31.1   (23.8; 27.5, 65.3, 79.3)
//   4096 -> 2 x 11008     42.7   44.7   51.4   (42.7; 53.5, 120, 162, with silu_mul)
//   11008 -> 4096         23.7   24.7   31.7   (21.3; 23.3, 138, 108)
//
// What decides these is how blocks fill the multiprocessors. Before 11008 -> 4096 had one block on each, with a ring of
// as many stages as fit, it took 26.2, 27.7 and 32.8; before gate and up shared x among four blocks for every number of
// rows, and had three warpgroups for 64, they took 45.0, 44.6 and 63.4.
//
// GPT-2 small in bfloat16, 256 rows, from the end of the kernel before to its own end in a step, by time stamps (with
// the tiles of decode_tiles.cu): qkv 9.1 (13.6), o 5.3 (6.5), fc 10.5 (14.2), proj 8.3 (12.3). 1.7 to 4.3 of these are
// the epilogue. Before it was a loop, qkv's and fc's took 11: a block fetched 3,300 to 5,000 instructions, and ran each
// once.
//
// With more than 32 rows a block requests more than half of a multiprocessor's shared memory, so that there is one: 64
// rows of GPT-2 small in E4M3, where there was room for four, took 621 us a step, and take 593.
//
// With TERM_COUNT 1 a product has half of the columns of B and of the bytes of x. Steps in milliseconds: GPT-2 small,
// float16, 256 and 512 rows, 1.75 -> 1.72 and 3.14 -> 3.08; Llama 7B, 16 and 64 rows, float16 4.64 -> 4.52 and 8.44 ->
// 8.08, E5M2 3.26 -> 3.11 and 7.51 -> 6.76.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#include "lib/decode/wgmma_tile.cuh"
#include "lib/decode/wgmma_epilogues.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) linear_decode_hopper(
    const float* x,                        // (M, K), terms
    const __grid_constant__ TensorMap w,   // (1, N, K)
    const __grid_constant__ TensorMap up,  // (1, N, K), with DH_GATED
    const float* __restrict__ scale,       // (N) or null
    const float* __restrict__ up_scale,    // (N) or null
    const float* __restrict__ bias,        // (N) or null
    const float* residual,                 // (M, N) or null; may be out
    float* out,                            // (M, N), with DH_OUT_TERMS terms
    int M, int N, int K, int gelu) {
    const Scales scales{scale, up_scale, bias};
#if DH_OUT_TERMS
    run(x, {w, up}, scales, AddTerms{{{residual, out, N, gelu}}, M}, M, N, K);
#else
    run(x, {w, up}, scales, AddTwo{{residual, out, N, gelu}}, M, N, K);
#endif
}

// Row m is the next token of sequence row[m], at position[m] of its cache. Tokens outside the cache are not stored.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) qkv_decode_hopper(
    const float* x,                       // (M, K), terms
    const __grid_constant__ TensorMap w,  // (1, 3C, K)
    const float* __restrict__ scale,      // (3C) or null
    const float* __restrict__ bias,       // (3C) or null
    const int* row,                       // (M)
    const int* position,                  // (M)
    float* q,                             // (M, C)
    KV* k_cache,                          // (B, n_ctx, C)
    KV* v_cache,                          // (B, n_ctx, C)
    int M, int K, int C, int B, int n_ctx) {
    const AppendTwo end{{q, k_cache, v_cache, row, position, C, B, n_ctx}};
    run(x, {w, w}, Scales{scale, nullptr, bias}, end, M, 3 * C, K);
}
