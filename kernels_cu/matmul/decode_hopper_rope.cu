// The product of q, k and v of a step of decoding: q goes to an array, k and v to the KV cache.
//
//   rope_decode_hopper: qkv_decode_hopper with RoPE of q and k
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a)   for pair k of a head of q or k; cos a, sin a: llama/rotations.cu
//
// A pair is channels k and k + D / 2 of a head. The product is that of matmul/decode_hopper.cu, which describes tiles
// and launches: a warp has 8 rows of W and those half a head further, so that a lane has both sums of a pair. The
// result has the bits of that product followed by llama/rope_append.cu.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#ifndef DH_ROPE  // D
#define DH_ROPE 128
#endif
#include "llama/rotation.cuh"
#include "matmul/decode_hopper_tile.cuh"

// Heads of D channels, first those of q, then of k, then of v. Pair n is channels n % (D / 2) and D / 2 further, of
// head n / (D / 2). late(m, n) loads what it needs before its sums are complete.
struct RopeAppend {
    static constexpr int D = DH_ROPE;
    static constexpr bool BY_ROW = false;
    struct Late {
        Rotation by;
        long long place;  // of the token's first head in the cache seen as (B n_ctx n_kv_head, D), or -1
    };
    const float* rotations;  // (M, D / 2, 2)
    float* q;                // (M, n_head D)
    KV* k_cache;             // (B, n_ctx, n_kv_head D)
    KV* v_cache;
    const int* row;       // (M)
    const int* position;  // (M)
    int n_head, n_kv_head, B, n_ctx;

    __device__ Late late(int m, int n) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
        const float2* by = reinterpret_cast<const float2*>(rotations) + (long long)m * (D / 2) + n % (D / 2);
        const float2 found = n / (D / 2) < n_head + n_kv_head ? __ldcg(by) : float2{1.0f, 0.0f};
        return {{found.x, found.y}, cached ? ((long long)b * n_ctx + at) * n_kv_head : -1};
    }

    __device__ void store_pair(int m, int n, float first, float second, const Late& late) const {
        const int head = n / (D / 2), channel = n % (D / 2), of_k = head - n_head, of_v = of_k - n_kv_head;
        if (of_v < 0) turn(late.by, first, second);
        if (of_k < 0) {
            float* to = q + ((long long)m * n_head + head) * D + channel;
            to[0] = first, to[D / 2] = second;
        } else if (late.place >= 0) {
            KV* to = (of_v < 0 ? k_cache + (late.place + of_k) * D : v_cache + (late.place + of_v) * D) + channel;
            to[0] = narrowed<KV>(first), to[D / 2] = narrowed<KV>(second);
        }
    }
};

// Row m is the next token of sequence row[m], at position[m] of its cache. Tokens outside the cache are not stored.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) rope_decode_hopper(
    const float* x,                       // (M, K), terms
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
    run(x, w, w, scales, end, M, (n_head + 2 * n_kv_head) * HALF_HEAD, K);
}
