// Appends new keys and values to a kv_cache: row n of qkv belongs to sequence row[n], at position[n].
//
//   k[row, position] = columns C..2C-1 of qkv, v[row, position] = columns 2C..3C-1   qkv (N, 3C), k, v (B, n_ctx, C)
//
//   kv_append          qkv of float, converted to T
//   kv_append_narrow   qkv of T, as tensor-core products produce it
//
// One thread per vector of KV_WIDTH channels: loads of at most 16 bytes each, one store. Rows and positions outside the
// cache are skipped. Grid (N), block (any).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

#ifndef KV_WIDTH  // a power of two that divides C, at most 16 bytes of T; all arrays are aligned to a vector
#define KV_WIDTH 4
#endif

// Calls move(from, to) for each vector of a row.
template <typename E, typename Move>
__device__ __forceinline__ void append(
    const E* qkv, const int* row, const int* position, T* k, T* v, int C, int B, int n_ctx, Move move) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int b = __ldcg(row + n), at = __ldcg(position + n);
    if (b < 0 || b >= B || at < 0 || at >= n_ctx) return;
    const E* const from = qkv + (3 * n + 1) * C;  // K, followed by V
    const long long to = ((long long)b * n_ctx + at) * C;
    for (int i = threadIdx.x * KV_WIDTH; i < 2 * C; i += blockDim.x * KV_WIDTH) {
        move(from + i, i < C ? k + to + i : v + to + (i - C));
    }
}

extern "C" __global__ void kv_append(
    const float* qkv,     // (N, 3C)
    const int* row,       // (N)
    const int* position,  // (N)
    T* k,                 // (B, n_ctx, C)
    T* v,                 // (B, n_ctx, C)
    int C, int B, int n_ctx) {
    append(qkv, row, position, k, v, C, B, n_ctx, [](const float* from, T* to) {
        float values[KV_WIDTH];
        load_fresh_floats<KV_WIDTH>(from, values);
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
    append(qkv, row, position, k, v, C, B, n_ctx, [](const T* from, T* to) {
        typedef Vec<T, KV_WIDTH> Vector;
        *reinterpret_cast<typename Vector::Raw*>(to) = load_fresh<T, KV_WIDTH>(from).raw;
    });
}
