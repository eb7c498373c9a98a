// The product of q, k and v of matmul/decode/wgmma_gguf.cu with RoPE, as in matmul/decode/wgmma_rope.cu.
//
//   rope_hopper_gguf: qkv_hopper_gguf for Llama models, with RoPE of q and k
//
// architecture: sm_90a
#ifndef WEIGHT_GGUF
#define WEIGHT_GGUF
#endif
#ifndef TERM_COUNT
#define TERM_COUNT 1
#endif
#ifndef DH_ROPE  // D, channels per head
#define DH_ROPE 128
#endif
#include "lib/decode/wgmma_tile.cuh"
#include "lib/decode/wgmma_epilogues.cuh"

// Row m is the next token of sequence row[m], at position[m]. Its K and V are stored if this place is in the cache.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) rope_hopper_gguf(
    const float* x,                  // (M, K), stored as 16-bit terms
    const W* w,                      // (heads D, K), GGUF blocks, heads = n_head + 2 n_kv_head
    const float* sums,               // (M, K / 32): sums of x (lib/chunk_sums.cuh), or null
    const float* __restrict__ bias,  // (heads D) or null
    const float* rotations,          // (M, D / 2, 2)
    const int* row,                  // (M)
    const int* position,             // (M)
    float* q,                        // (M, n_head D)
    KV* k_cache,                     // (B, n_ctx, n_kv_head D)
    KV* v_cache,                     // (B, n_ctx, n_kv_head D)
    int M, int K, int n_head, int n_kv_head, int B, int n_ctx) {
    const RopeAppend end{rotations, q, k_cache, v_cache, row, position, n_head, n_kv_head, B, n_ctx};
    const Scales scales{nullptr, nullptr, bias};
    run(x, {w, nullptr, sums}, scales, end, M, (n_head + 2 * n_kv_head) * HALF_HEAD, K);
}
