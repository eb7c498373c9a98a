// Appends new keys and values to a kv_cache: row n of qkv belongs to sequence row[n], at position[n].
//
//   k[row, position] = columns C..2C-1 of qkv, v[row, position] = columns 2C..3C-1   qkv (N, 3C), k, v (B, n_ctx, C)
//
//   kv_append          qkv of float, converted to T
//   kv_append_narrow   qkv of T, as tensor-core products produce it
//
// For each vector loads of at most 16 bytes each, and one store: attention/kv_cache.cuh.
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "attention/kv_cache.cuh"

extern "C" __global__ void kv_append(
    const float* qkv,     // (N, 3C)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int B, int n_ctx) {
    append(row, position, k, v, C, B, n_ctx, [&](long long from, T* to) {
        float values[KV_WIDTH];
        load_fresh_floats<KV_WIDTH>(qkv + from, values);
        Vec<T, KV_WIDTH>::store(to, values);
    });
}

extern "C" __global__ void kv_append_narrow(
    const T* qkv,         // (N, 3C)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int B, int n_ctx) {
    append(row, position, k, v, C, B, n_ctx, [&](long long from, T* to) {
        typedef Vec<T, KV_WIDTH> Vector;
        *reinterpret_cast<typename Vector::Raw*>(to) = load_fresh<T, KV_WIDTH>(qkv + from).raw;
    });
}
