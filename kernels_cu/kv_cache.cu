// New keys and values into a kv_cache: row n of qkv belongs to sequence row[n], at position[n].
//
//   k[row, position] = columns C..2C-1 of qkv, v[row, position] = columns 2C..3C-1   qkv (N, 3C), k, v (B, n_ctx, C)
//
// A thread a vector of KV_WIDTH channels, which are narrowed to T: loads of float4, a store of at most 16 bytes. A row
// or position outside the cache is left out. Grid (N), block (any).
#include "fresh.cuh"
#include "overlap.cuh"

#ifndef KV_WIDTH  // a power of two that divides C, 16 bytes of T at most; all arrays are aligned to so many elements
#define KV_WIDTH 4
#endif

extern "C" __global__ void kv_append(
    const float* qkv,     // (N, 3C)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int B, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int b = __ldcg(row + n), at = __ldcg(position + n);
    if (b < 0 || b >= B || at < 0 || at >= n_ctx) return;
    const float* const from = qkv + (3 * n + 1) * C;  // K, and V behind it
    const long long to = ((long long)b * n_ctx + at) * C;
    for (int i = threadIdx.x * KV_WIDTH; i < 2 * C; i += blockDim.x * KV_WIDTH) {
        float values[KV_WIDTH];
        load_fresh_floats<KV_WIDTH>(from + i, values);
        Vec<T, KV_WIDTH>::store(i < C ? k + to + i : v + to + (i - C), values);
    }
}
