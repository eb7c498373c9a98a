// Appends new keys and values to a kv_cache: row n of qkv belongs to sequence row[n], at position[n].
//
//   qkv (N, W): a row is [Q | K | V], and its last 2 C columns are K and V. With grouped queries, W > 3C
//   k[row, position] = columns W-2C..W-C-1 of qkv, v[row, position] = columns W-C..W-1   k, v (B, n_ctx, C)
//
//   kv_append, kv_append_narrow: writes K and V of packed rows to the kv_cache, converted to its dtype where needed.
//       kv_append reads qkv as float, kv_append_narrow as T, the output type of tensor-core products
//   kv_round: rounds K and V of packed rows in place to values that an FP8 kv_cache can hold. qkv has type T
//   kv_copy: copies the first positions of sequences to other sequences, in all layers at once. One array contains the
//       K array and the V array of every layer; each of these is called a half. Grid (any, M, halves)
//
// k and v have type KV. A thread copies a vector by loads of at most 16 bytes each and one store
// (lib/attention/kv_cache.cuh).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/attention/kv_cache.cuh"

// Launched by operation (variant): kv_append (append)
extern "C" __global__ void kv_append(
    const float* qkv,     // (N, W)
    const int* row,       // (N)
    const int* position,  // (N)
    KV* k,                // (B, n_ctx, C)
    KV* v,                // (B, n_ctx, C)
    int C, int W, int B, int n_ctx) {
    append(row, position, k, v, C, W, B, n_ctx, [&](long long from, KV* to) {
        float values[KV_WIDTH];
        load_fresh_floats<KV_WIDTH>(qkv + from, values);
        Vec<KV, KV_WIDTH>::store(to, values);
    });
}

// Launched by operation (variant): kv_append (append)
extern "C" __global__ void kv_append_narrow(
    const T* qkv,         // (N, W)
    const int* row,       // (N)
    const int* position,  // (N)
    KV* k,                // (B, n_ctx, C)
    KV* v,                // (B, n_ctx, C)
    int C, int W, int B, int n_ctx) {
    append(row, position, k, v, C, W, B, n_ctx, [&](long long from, KV* to) {
        typedef Vec<T, KV_WIDTH> Vector;
        if constexpr (sizeof(KV) == sizeof(T)) {
            *reinterpret_cast<typename Vector::Raw*>(to) = load_fresh<T, KV_WIDTH>(qkv + from).raw;
        } else {
            float values[KV_WIDTH];
            load_fresh<T, KV_WIDTH>(qkv + from).unpack(values);
            Vec<KV, KV_WIDTH>::store(to, values);
        }
    });
}

// Launched by operation (variant): kv_round (round)
extern "C" __global__ void kv_round(
    T* qkv,  // (N, W)
    int C, int W) {
    let_next_start();
    wait_for_previous();
    T* const own = qkv + (long long)(blockIdx.x + 1) * W - 2 * C;
    for (int i = threadIdx.x * KV_WIDTH; i < 2 * C; i += blockDim.x * KV_WIDTH) {
        float values[KV_WIDTH];
        load_fresh<T, KV_WIDTH>(own + i).unpack(values);
        Vec<KV, KV_WIDTH>::pack(values).unpack(values);
        Vec<T, KV_WIDTH>::store(own + i, values);
    }
}

// Launched by operation (variant): kv_copy (copy)
extern "C" __global__ void kv_copy(
    KV* kv,             // (halves, B, n_ctx, C), aligned to a vector
    const int* source,  // (M): source sequences
    const int* target,  // (M): target sequences; no target is another target or a source of another pair
    const int* count,   // (M): positions to copy
    int C, int B, int n_ctx) {
    let_next_start();
    wait_for_previous();
    typedef typename Vec<KV, KV_WIDTH>::Raw Raw;
    const int from = __ldcg(source + blockIdx.y), to = __ldcg(target + blockIdx.y);
    if (from < 0 || from >= B || to < 0 || to >= B || from == to) return;
    const long long size = (long long)n_ctx * C;  // elements per sequence
    const long long n = (long long)min(__ldcg(count + blockIdx.y), n_ctx) * C;
    KV* const half = kv + blockIdx.z * B * size;
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * KV_WIDTH;
    for (long long i = first; i < n; i += (long long)gridDim.x * blockDim.x * KV_WIDTH) {
        *reinterpret_cast<Raw*>(half + to * size + i) = __ldcg(reinterpret_cast<const Raw*>(half + from * size + i));
    }
}
