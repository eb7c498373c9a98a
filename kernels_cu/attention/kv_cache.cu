// Appends new keys and values to a kv_cache: row n of qkv belongs to sequence row[n], at position[n].
//
//   qkv (N, W), rows [Q | K | V], of which the last 2 C columns are K and V: with grouped queries W > 3C
//   k[row, position] = columns W-2C..W-C-1 of qkv, v[row, position] = columns W-C..W-1   k, v (B, n_ctx, C)
//
//   kv_append          qkv of float, converted to T
//   kv_append_narrow   qkv of T, as tensor-core products produce it
//
// For each vector loads of at most 16 bytes each, and one store: attention/kv_cache.cuh.
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "attention/kv_cache.cuh"

extern "C" __global__ void kv_append(
    const float* qkv,     // (N, W)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int W, int B, int n_ctx) {
    append(row, position, k, v, C, W, B, n_ctx, [&](long long from, T* to) {
        float values[KV_WIDTH];
        load_fresh_floats<KV_WIDTH>(qkv + from, values);
        Vec<T, KV_WIDTH>::store(to, values);
    });
}

extern "C" __global__ void kv_append_narrow(
    const T* qkv,         // (N, W)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int W, int B, int n_ctx) {
    append(row, position, k, v, C, W, B, n_ctx, [&](long long from, T* to) {
        typedef Vec<T, KV_WIDTH> Vector;
        *reinterpret_cast<typename Vector::Raw*>(to) = load_fresh<T, KV_WIDTH>(qkv + from).raw;
    });
}
