// Matrix products of a GPT-2 layer, and lm_head, in decoding on sm_75 and newer:
//
//   decode_mma: few rows on tensor cores, x rounded to one or two terms of the tensor cores' input type; a row has the
//       same bits in any batch. out = [residual +] [gelu] (x W^T * scale + bias); with DECODE_NORM, x is replaced by
//       its LayerNorm or RMSNorm; with DECODE_UP, for two matrices, out = silu(x W^T * scale) (x up^T * up_scale)
//
// EPILOGUE selects other outputs (lib/decode/epilogues.cuh):
//
//   decode_mma (qkv_mma): EPILOGUE_APPEND stores q in an array, k and v in the KV cache
//   decode_mma (linear_sums): EPILOGUE_ADD_SUMS also adds the split sums of matmul/decode/ffn_mma.cu to the residual
//   decode_mma (rope_sums): EPILOGUE_APPEND_ROPE rotates q and k before it stores them. The split sums are added to x.
//       With DECODE_QK_NORM, heads of q and k are normalised (positions/qk_norm.cu); the blocks of a cluster add up
//       their squares
//
// lib/decode/order.cuh defines the order of the additions. W is (N, K). As in matmul/decode/cores.cu, all loads of
// weights are issued before the wait for the previous kernel, and little work is left for the time after the wait:
//
//   all warps   [ load weights | wait for x | x, its LayerNorm, as two terms | mma | sums of splits, epilogue ]
//
//   block   DECODE_COLUMNS neighbouring outputs of DECODE_ROWS rows; one warp per split
//   warp    the products of one split (a range of K) for all columns. Only LayerNorm and final sums need barriers
//   lane    has DECODE_FLIGHT units of 128 values of K in flight: UNIT_CHUNKS 16-byte vectors per unit and eight
//   columns
//
// An mma computes 4 rows of x (two terms each) by 16 columns of w, or by 8 columns if weights have two terms. Any
// number of columns is possible: lanes without a column multiply zeros. Multiples of eight columns are faster, because
// an mma with fewer columns takes as long.
//
// With DECODE_UP, half of a block's columns are rows of W, and the other half are rows of the matrix `up`. With
// DECODE_UP and fused RMSNorm and RoPE, a layer of SmolLM2 135M with 5 to 16 rows has five kernels instead of ten, and
// takes less time.
//
// With DECODE_LOOP, a warp multiplies all splits of DECODE_COLUMNS columns, one split after the other, and then
// continues with other columns, without any barrier. This is for products with more columns than one grid can hold,
// such as lm_head.
//
// grid (ceil(N / DECODE_COLUMNS) or with DECODE_LOOP any number, ceil(M / DECODE_ROWS)), block (32 * WARPS). `geometry`
// of the Python module `linear_mma` computes the dynamic shared memory. Any M and N; the size of a row of W is a
// multiple of 16 bytes.
//
// Measured: docs/experiments.md#decode_mma, with DECODE_UP docs/experiments.md#decode_ffn_mma
#include "matmul/decode/mma.cuh"

// Launched by operation (variant): linear (mma), linear_qkv (qkv_mma), linear_rope (rope_mma),
// linear_sums (linear_sums), rope_sums (rope_sums)
extern "C" __global__ void __cluster_dims__(DECODE_CLUSTER, 1, 1) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma(
    const float* x,                       // (M, K)
    const float* __restrict__ gamma,      // (K), with DECODE_NORM
    const float* __restrict__ beta,       // (K), with DECODE_NORM 1
    const W* __restrict__ w,              // (N, K); hi/lo weights: (2, N, K)
    const float* __restrict__ scale,      // (N) or null
    const W* __restrict__ up,             // (N, K), with DECODE_UP
    const float* __restrict__ up_scale,   // (N) or null
    const float* __restrict__ bias,       // (N) or null
    float x_scale,                        // scale of x, with hi/lo weights
    const float* sums,                    // (DECODE_SUMS, M, N); with EPILOGUE_APPEND_ROPE (.., M, K), to add to x
    const float* __restrict__ sum_scale,  // (N) or null; with EPILOGUE_APPEND_ROPE (K) or null
    const float* residual,                // (M, N) or null; may be out
    float* out,                           // (M, N); with a KV cache only q, the first columns of [q | k | v]
    const float* rotations,               // (M, DECODE_ROPE / 2, 2), with DECODE_ROPE
    const int* row,                       // (M)
    const int* position,                  // (M)
    KV* k_cache,                          // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    KV* v_cache,                          // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    const float* __restrict__ gamma_q,    // (DECODE_ROPE), with DECODE_QK_NORM
    const float* __restrict__ gamma_k,    // (DECODE_ROPE), with DECODE_QK_NORM
    float eps, int M, int N, int gelu, int C, int n_head, int n_kv_head, int B, int n_ctx,
    const long long* own, long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5,
    long long* to_6, long long* to_7, int first_column, int all_columns, int capacity) {  // EPILOGUE_PEERS: Peers
#if EPILOGUE == EPILOGUE_ADD_SUMS
    const AddSums<DECODE_SUMS> end{residual, sums, sum_scale, out, M, N};
    run(x, nullptr, nullptr, 0.0f, M, w, scale, nullptr, 1.0f, end, N);
#elif EPILOGUE == EPILOGUE_APPEND_ROPE
    const AppendRope<DECODE_ROPE> end{rotations, out, k_cache, v_cache, row, position,
                                  n_head, n_kv_head, B, n_ctx, gamma_q, gamma_k, eps};
    run(x, gamma, nullptr, eps, M, w, scale, bias, 1.0f, end, N, sums, sum_scale);
#elif EPILOGUE == EPILOGUE_APPEND
    const Append end{out, k_cache, v_cache, row, position, C, B, n_ctx};
    run(x, gamma, beta, eps, M, w, scale, bias, x_scale, end, N);
#else
#if EPILOGUE == EPILOGUE_PEERS
    const Peers peers{own, {to_1, to_2, to_3, to_4, to_5, to_6, to_7}, first_column, all_columns, capacity};
    const ToPeers end(out, N, gelu, peers);
#else
    const Add end{residual, out, N, gelu};
#endif
    run(x, gamma, beta, eps, M, w, scale, bias, x_scale, end, N, nullptr, nullptr, up, up_scale);
#endif
}
