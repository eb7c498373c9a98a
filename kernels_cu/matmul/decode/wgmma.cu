// Matrix products of decoding whose weights stream from memory: up to 64 rows share one read of the weights.
//
//   decode_wgmma: large matrices or many rows on Hopper, by wgmma, with x as 16-bit terms; the same bits as decode_mma.
//       out = [residual +] [gelu] (x W^T * scale + bias), or with DH_GATED, for two matrices,
//       out = silu(x W^T * scale) (x U^T * up_scale)
//   decode_wgmma (qkv_hopper): EPILOGUE_APPEND stores q in an array, k and v in the KV cache
//   decode_wgmma (rope_hopper): EPILOGUE_APPEND_ROPE rotates q and k before it stores them. A warp has 8 rows of W and
//       the 8 rows that are D / 2 rows later, so that a lane has both sums of a pair of channels. The result has the
//       same bits as the product without RoPE followed by positions/rope_append.cu
//
// The additions are in the order of lib/decode/order.cuh. W (N, K), of 16 bits or FP8, is operand A of the products and
// is loaded into registers, where FP8 is converted. x (M, K) is operand B: the previous kernel has stored x as terms
// (lib/terms.cuh), in the order in which wgmma reads them. A row of x is two columns of B, or one with TERM_COUNT 1.
//
//   block        64 * DH_GROUPS rows of A, for up to DH_ROWS rows of x; with DH_SPLITS > 1 only a part of K
//   last warp    requests slices of K, 128 bytes of each row of W: W through a tensor map, x as contiguous memory. It
//                requests as much of W as the ring can hold before the previous kernel has ended
//   warpgroup    64 rows of A, 16 per warp: rows of W or, with DH_GATED, 8 rows of W and the same 8 rows of U. With
//                DH_TEAMS 2, two sets of warpgroups have the same rows of A, each with half of the rows of x
//
//   ring   [W | x] [W | x] [W | x] ...   barriers: full: a slice has arrived; empty: all warps have used the slice
//
// With two blocks on a multiprocessor, one block copies while the other block begins, ends or waits. A cluster has
// DH_SHARES neighbouring tiles of columns, which need the same x: each block copies a part of each slice of x to all of
// these blocks. Otherwise the L2 cache would deliver as many bytes of x as of W. A cluster has DH_SPLITS blocks per
// tile, which divide K and exchange the sums of their splits (ranges of K): block i % DH_SPLITS receives the sums of
// sub-tile i (16 columns by 4 rows) and adds them in order.
//
// Any M and N; K is a multiple of 64. grid (DH_SHARES * DH_SPLITS * ceil(M / TERM_ROWS) * ceil(N / (COLUMNS *
// DH_SHARES))), block (128 * DH_GROUPS * DH_TEAMS + 32), or 512 with DH_GROUPS 3.
// gpt2block/ops/engines/linear_hopper.py chooses the constants and computes the dynamic shared memory.
//
// On an NVIDIA H200, float16 weights of Llama 7B, in us for 1, 16 and 64 rows, in a version whose epilogue was
// unrolled. In brackets: the time to read the weights at the rate of a memory copy; then the times of
// matmul/decode/mma.cu (1 row) and mma_tiles.cu (16 and 64 rows):
//
//   4096 -> 12288         24.0   26.3   31.1   (23.8; 27.5, 65.3, 79.3)
//   4096 -> 2 x 11008     42.7   44.7   51.4   (42.7; 53.5, 120, 162, with silu_mul)
//   11008 -> 4096         23.7   24.7   31.7   (21.3; 23.3, 138, 108)
//
// GPT-2 small in bfloat16, 256 rows, in us from the end of the previous kernel to the kernel's own end, by time stamps
// in a step (in brackets: matmul/decode/mma_tiles.cu): qkv 9.1 (13.6), o 5.3 (6.5), fc 10.5 (14.2), proj 8.3 (12.3). Of
// these times, 1.7 to 4.3 us are the epilogue. When the epilogue was unrolled, it took 11 us for qkv and for fc: a
// block fetched 3,300 to 5,000 instructions and executed each instruction once.
//
// With more than 32 rows, a block requests more than half of a multiprocessor's shared memory, so that a multiprocessor
// runs one block. A step of 64 rows of GPT-2 small in E4M3 takes 593 us; with up to four blocks per multiprocessor it
// took 621 us.
//
// With TERM_COUNT 1 instead of 2, a product has half the columns of B and half the bytes of x. Steps in ms: GPT-2
// small, float16, 256 and 512 rows, 1.75 -> 1.72 and 3.14 -> 3.08; Llama 7B, 16 and 64 rows, float16 4.64 -> 4.52 and
// 8.44 -> 8.08, E5M2 3.26 -> 3.11 and 7.51 -> 6.76.
//
// K can be any multiple of 64, not only of 128. Therefore this kernel computes the products of SmolLM2-135M, whose rows
// have 576 channels, for more than 32 rows, except the small product o. Before, mma.cu and mma_tiles.cu computed them;
// these fuse neither RoPE nor the gate for so many rows. On an NVIDIA H200, a step takes, in us, with 64 rows 1,117 ->
// 911 and with 256 rows 2,849 -> 2,193 in bfloat16; in E4M3 983 -> 875 and 2,705 -> 2,019. With DH_TEAMS 2 for the
// products with RoPE and the gate, alternately with DH_TEAMS 1 on another H200: 937 -> 900 and 2,247 -> 2,206 in
// bfloat16, 895 -> 865 and 2,076 -> 2,022 in E4M3. The gain is in the epilogue: each warp has half of the outputs.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#include "lib/decode/wgmma_tile.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) decode_wgmma(
    const float* x,                        // (M, K), stored as 16-bit terms
    const __grid_constant__ TensorMap w,   // (1, N, K)
    const __grid_constant__ TensorMap up,  // (1, N, K), with DH_GATED
    const float* __restrict__ scale,       // (N) or null
    const float* __restrict__ up_scale,    // (N) or null
    const float* __restrict__ bias,        // (N) or null
    const float* residual,                 // (M, N) or null; may be out
    float* out,                            // (M, N), with DH_OUT_TERMS as 16-bit terms; with a KV cache only q
    const float* rotations,                // (M, DH_ROPE / 2, 2), with DH_ROPE
    const int* row,                        // (M)
    const int* position,                   // (M)
    KV* k_cache,                           // (B, n_ctx, C), or (B, n_ctx, n_kv_head DH_ROPE)
    KV* v_cache,                           // (B, n_ctx, C), or (B, n_ctx, n_kv_head DH_ROPE)
    int M, int N, int K, int gelu, int C, int n_head, int n_kv_head, int B, int n_ctx,
    const long long* own, long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5,
    long long* to_6, long long* to_7, int first_column, int all_columns, int capacity) {  // EPILOGUE_SEND: Mail
#if EPILOGUE == EPILOGUE_APPEND_ROPE
    const Scales scales{scale, scale ? scale + HALF_HEAD : nullptr, bias};
    const AppendRopeTwo end{{rotations, out, k_cache, v_cache, row, position, n_head, n_kv_head, B, n_ctx}};
    run(x, {w, w}, scales, end, M, N / 2, K);
#elif EPILOGUE == EPILOGUE_APPEND
    const AppendTwo end{{out, k_cache, v_cache, row, position, C, B, n_ctx}};
    run(x, {w, w}, Scales{scale, nullptr, bias}, end, M, N, K);
#elif EPILOGUE == EPILOGUE_SEND
    const Mail mail{own, {to_1, to_2, to_3, to_4, to_5, to_6, to_7}, first_column, all_columns, capacity};
    run(x, {w, up}, Scales{scale, up_scale, bias}, SendTwo(out, N, gelu, mail), M, N, K);
#elif DH_OUT_TERMS
    run(x, {w, up}, Scales{scale, up_scale, bias}, AddTerms{{{residual, out, N, gelu}}, M}, M, N, K);
#else
    run(x, {w, up}, Scales{scale, up_scale, bias}, AddTwo{{residual, out, N, gelu}}, M, N, K);
#endif
}
