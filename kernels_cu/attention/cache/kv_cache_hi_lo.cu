// Appends new keys and values from hi/lo rows to a kv_cache of float. A hi/lo row holds each number as two
// float16 numbers, with one scale per row.
//
//   kv_append_split: kv_append from hi/lo rows. See attention/cache/kv_cache.cu and lib/hi_lo.cuh
//
//   qkv (N, W): a row is [Q | K | V], and its last 2 C columns are K and V. With grouped queries, W > 3C
//   k[row, position] = columns W-2C..W-C-1 of qkv, v[row, position] = columns W-C..W-1   k, v (B, n_ctx, C)
#define STORAGE_FP16 1
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/attention/kv_cache.cuh"
#include "lib/hi_lo.cuh"

// Launched by operation (variant): kv_append (append split)
extern "C" __global__ void kv_append_split(
    const T* parts,       // (2, N, W)
    const float* scale,   // (N)
    const int* row,       // (N)
    const int* position,  // (N)
    float* k,             // (B, n_ctx, C)
    float* v,             // (B, n_ctx, C)
    int C, int W, int B, int n_ctx) {
    append(row, position, k, v, C, W, B, n_ctx, [&](long long from, float* to) {
        float high[KV_WIDTH], low[KV_WIDTH];
        load_fresh<T, KV_WIDTH>(parts + from).unpack(high);
        load_fresh<T, KV_WIDTH>(parts + (long long)gridDim.x * W + from).unpack(low);
        join(high, low, __ldcg(scale + blockIdx.x));
        Vec<float, KV_WIDTH>::store(to, high);
    });
}
