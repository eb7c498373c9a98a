// Matrix products of decoding whose weights stream from memory: up to 64 rows share one read of the weights.
//
//   decode_wgmma: large matrices or many rows on Hopper, by wgmma, with x as 16-bit terms; the same bits as decode_mma.
//       out = [residual +] [gelu] (x W^T * scale + bias), or with DECODE_GATED, for two matrices,
//       out = silu(x W^T * scale) (x U^T * up_scale)
//   decode_wgmma (qkv_wgmma): EPILOGUE_APPEND stores q in an array, k and v in the KV cache
//   decode_wgmma (rope_wgmma): EPILOGUE_APPEND_ROPE rotates q and k before it stores them. A warp has 8 rows of W and
//       the 8 rows that are D / 2 rows later, so that a lane has both sums of a pair of channels. The result has the
//       same bits as the product without RoPE followed by positions/rope_append.cu
//
// The additions are in the order of lib/decode/order.cuh. W (N, K), of 16 bits or FP8, is operand A of the products and
// is loaded into registers, where FP8 is converted. x (M, K) is operand B: the previous kernel has stored x as terms
// (lib/operands.cuh), in the order in which wgmma reads them. A row of x is two columns of B, or one with OPERAND_TERMS
// 1.
//
//   block        64 * DECODE_GROUPS rows of A, for up to DECODE_ROWS rows of x; with DECODE_SPLITS > 1 only a part of K
//   last warp    requests slices of K, 128 bytes of each row of W: W through a tensor map, x as contiguous memory. It
//                requests as much of W as the ring can hold before the previous kernel has ended
//   warpgroup    64 rows of A, 16 per warp: rows of W or, with DECODE_GATED, 8 rows of W and the same 8 rows of U. With
//                DECODE_TEAMS 2, two sets of warpgroups have the same rows of A, each with half of the rows of x
//
//   ring   [W | x] [W | x] [W | x] ...   barriers: full: a slice has arrived; empty: all warps have used the slice
//
// With two blocks on a multiprocessor, one block copies while the other block begins, ends or waits. A cluster has
// DECODE_SHARES neighbouring tiles of columns, which need the same x: each block copies a part of each slice of x to
// all of these blocks. Otherwise the L2 cache would deliver as many bytes of x as of W. A cluster has DECODE_SPLITS
// blocks per tile, which divide K and exchange the sums of their splits (ranges of K): block i % DECODE_SPLITS receives
// the sums of sub-tile i (16 columns by 4 rows) and adds them in order.
//
// Any M and N; K is a multiple of 64. grid (DECODE_SHARES * DECODE_SPLITS * ceil(M / OPERAND_ROWS) * ceil(N / (COLUMNS
// * DECODE_SHARES))), block (128 * DECODE_GROUPS * DECODE_TEAMS + 32), or 512 with DECODE_GROUPS 3.
// gpt2block/ops/engines/linear_wgmma.py chooses the constants and computes the dynamic shared memory.
//
// The epilogue is a loop. When it was unrolled, it took several times as long: a block fetched 3,300 to 5,000
// instructions and executed each instruction once.
//
// With more than 32 rows, a block requests more than half of a multiprocessor's shared memory, so that a multiprocessor
// runs one block. A step with up to four blocks per multiprocessor takes longer.
//
// With OPERAND_TERMS 1 instead of 2, a product has half the columns of B and half the bytes of x.
//
// K can be any multiple of 64, not only of 128. Therefore this kernel computes the products of SmolLM2-135M, whose rows
// have 576 channels, for more than 32 rows, except the small product o. Before, mma.cu and mma_tiles.cu computed them;
// these fuse neither RoPE nor the gate for so many rows. The gain of DECODE_TEAMS 2, for the products with RoPE and the
// gate, is in the epilogue: each warp has half of the outputs.
//
// Measured: docs/experiments.md#decode_wgmma
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#include "lib/decode/wgmma_tile.cuh"

// Launched by operation (variant): linear (wgmma), linear_qkv (qkv_wgmma), linear_rope (rope_wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_wgmma(
    const float* x,                        // (M, K), stored as 16-bit terms
    const __grid_constant__ TensorMap w,   // (1, N, K)
    const __grid_constant__ TensorMap up,  // (1, N, K), with DECODE_GATED
    const float* __restrict__ scale,       // (N) or null
    const float* __restrict__ up_scale,    // (N) or null
    const float* __restrict__ bias,        // (N) or null
    const float* residual,                 // (M, N) or null; may be out
    float* out,                            // (M, N), with DECODE_OUT_OPERAND as 16-bit terms; with a KV cache only q
    const float* rotations,                // (M, DECODE_ROPE / 2, 2), with DECODE_ROPE
    const int* row,                        // (M)
    const int* position,                   // (M)
    KV* k_cache,                           // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    KV* v_cache,                           // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    int M, int N, int K, int gelu, int C, int n_head, int n_kv_head, int B, int n_ctx,
    const long long* own, long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5,
    long long* to_6, long long* to_7, int first_column, int all_columns, int capacity) {  // EPILOGUE_PEERS: Peers
#if EPILOGUE == EPILOGUE_APPEND_ROPE
    const Scales scales{scale, scale ? scale + HALF_HEAD : nullptr, bias};
    const AppendRopeTwo end{{rotations, out, k_cache, v_cache, row, position, n_head, n_kv_head, B, n_ctx}};
    run(x, {w, w}, scales, end, M, N / 2, K);
#elif EPILOGUE == EPILOGUE_APPEND
    const AppendTwo end{{out, k_cache, v_cache, row, position, C, B, n_ctx}};
    run(x, {w, w}, Scales{scale, nullptr, bias}, end, M, N, K);
#elif EPILOGUE == EPILOGUE_PEERS
    const Peers peers{own, {to_1, to_2, to_3, to_4, to_5, to_6, to_7}, first_column, all_columns, capacity};
    run(x, {w, up}, Scales{scale, up_scale, bias}, TwoToPeers(out, N, gelu, peers), M, N, K);
#elif DECODE_OUT_OPERAND
    run(x, {w, up}, Scales{scale, up_scale, bias}, AddOperand{{{residual, out, N, gelu}}, M}, M, N, K);
#else
    run(x, {w, up}, Scales{scale, up_scale, bias}, AddTwo{{residual, out, N, gelu}}, M, N, K);
#endif
}
