// RoPE of new rows [Q | K | V]: Q and K are rotated, V is copied.
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a),   a = position[n] frequencies[p]   for pair p of a head in row n
//
//   qkv (N, heads D), heads = n_head + 2 n_kv_head     q (N, n_head D)     k, v (B, n_ctx, n_kv_head D) of type KV
//
//   rope_append: decoding: rope_qkv, with K and V written to the kv_cache in its dtype
//
// Row n belongs to sequence row[n], at position[n]. K and V of rows outside the cache are not stored. As with
// rope_pairs in learn/positions/rope.cu, a thread processes the same pairs of ROPE_HEADS heads of a row. Angles,
// ROPE_FACTOR and ROPE_GROWTH are as in positions/rope_qkv.cu. With ROPE_OWN, each sequence has its own frequencies.
//
// grid (ceil(N / blockDim.z), ceil(heads / (blockDim.y * ROPE_HEADS))), block (ROPE_THREADS, heads, rows).
#include "lib/rope_pairs.cuh"
#include "lib/overlap.cuh"

// Launched by operation (variant): rope_append (append)
extern "C" __global__ void rope_append(
    const float* qkv,           // (N, heads D)
    const int* row,             // (N)
    const int* position,        // (N)
    const double* frequencies,  // (D / 2), with ROPE_OWN (B, D / 2): radians per position
    KV* k,                      // (B, n_ctx, n_kv_head D)
    KV* v,                      // (B, n_ctx, n_kv_head D)
    float* q,                   // (N, n_head D)
    int N, int n_head, int n_kv_head, int B, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * blockDim.z + threadIdx.z;
    const int head = blockIdx.y * blockDim.y * ROPE_HEADS + threadIdx.y, heads = n_head + 2 * n_kv_head;
    if (n >= N) return;
    const int b = __ldcg(row + n), at = __ldcg(position + n);
    const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
#ifdef ROPE_OWN
    frequencies = frequencies_of(b, frequencies, B, ROPE_D / 2);
#endif
    const long long place = ((long long)b * n_ctx + at) * n_kv_head;
    for (int pair = threadIdx.x * PAIRS; pair < ROPE_D / 2; pair += ROPE_THREADS * PAIRS) {
        const int channel = ROPE_HALF_SPLIT ? pair : 2 * pair;
        Pairs<float> held[ROPE_HEADS];
#pragma unroll
        for (int i = 0; i < ROPE_HEADS; ++i) {
            const int h = head + i * blockDim.y;
            if (h < heads) held[i].load_fresh(qkv + ((long long)n * heads + h) * ROPE_D + channel);
        }
        Rotation by[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) by[p] = rotation_at(at, frequencies[pair + p]);
#pragma unroll
        for (int i = 0; i < ROPE_HEADS; ++i) {
            const int h = head + i * blockDim.y, of_k = h - n_head, of_v = of_k - n_kv_head;
            if (of_k < 0) {
                held[i].turn(by, q + ((long long)n * n_head + h) * ROPE_D + channel, query_factor(at));
            } else if (cached && of_v < 0) {
                held[i].turn(by, k + (place + of_k) * ROPE_D + channel);
            } else if (cached && h < heads) {
                held[i].copy(v + (place + of_v) * ROPE_D + channel);
            }
        }
    }
}
