// The product of q, k and v in a step of decoding: q is stored in an array, k and v in the KV cache.
//
//   rope_decode_hopper: qkv_decode_hopper with RoPE of q and k
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a)   for each pair (r, i) of channels of a head of q or k;
//   positions/rotations.cu computes cos a and sin a
//
// A pair is channels c and c + D / 2 of a head of D channels. matmul/decode/wgmma.cu describes the product, its tiles
// and launches. Here, a warp has 8 rows of W and the 8 rows that are D / 2 rows later, so that a lane has both sums of
// a pair. The result has the bits of the product without RoPE followed by positions/rope_append.cu.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#ifndef DH_ROPE  // D, channels per head
#define DH_ROPE 128
#endif
#include "lib/decode/wgmma_tile.cuh"
#include "lib/decode/wgmma_epilogues.cuh"

// Row m is the next token of sequence row[m], at position[m]. Its K and V are stored if this place is in the cache.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) rope_decode_hopper(
    const float* x,                       // (M, K), stored as 16-bit terms
    const __grid_constant__ TensorMap w,  // (1, heads D, K), heads = n_head + 2 n_kv_head
    const float* __restrict__ scale,      // (heads D) or null
    const float* __restrict__ bias,       // (heads D) or null
    const float* rotations,               // (M, D / 2, 2)
    const int* row,                       // (M)
    const int* position,                  // (M)
    float* q,                             // (M, n_head D)
    KV* k_cache,                          // (B, n_ctx, n_kv_head D)
    KV* v_cache,                          // (B, n_ctx, n_kv_head D)
    int M, int K, int n_head, int n_kv_head, int B, int n_ctx) {
    const RopeAppend end{rotations, q, k_cache, v_cache, row, position, n_head, n_kv_head, B, n_ctx};
    const Scales scales{scale, scale ? scale + HALF_HEAD : nullptr, bias};
    run(x, {w, w}, scales, end, M, (n_head + 2 * n_kv_head) * HALF_HEAD, K);
}
