// Appends new keys and values to a kv_cache of float, as attention/kv_cache.cu does, from a qkv in two parts
// (lib/two_part.cuh):
//
//   k[row, position] = columns C..2C-1 of qkv, v[row, position] = columns 2C..3C-1   qkv (N, 3C), k, v (B, n_ctx, C)
#ifndef STORAGE_FP16
#define STORAGE_FP16
#endif
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "attention/kv_cache.cuh"
#include "lib/two_part.cuh"

extern "C" __global__ void kv_append_split(
    const T* parts,       // (2, N, 3C)
    const float* scale,   // (N)
    const int* row,       // (N)
    const int* position,  // (N)
    float* k,             // (B, n_ctx, C)
    float* v,             // (B, n_ctx, C)
    int C, int B, int n_ctx) {
    append(row, position, k, v, C, B, n_ctx, [&](long long from, float* to) {
        float high[KV_WIDTH], low[KV_WIDTH];
        load_fresh<T, KV_WIDTH>(parts + from).unpack(high);
        load_fresh<T, KV_WIDTH>(parts + 3LL * gridDim.x * C + from).unpack(low);
        join(high, low, __ldcg(scale + blockIdx.x));
        Vec<float, KV_WIDTH>::store(to, high);
    });
}
