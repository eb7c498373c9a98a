// Token plus position embedding of packed rows: out[n] = wte[ids[n]] * scale[ids[n]] * ER_FACTOR + wpe[position[n]].
//
//   ids, position (N), wte (V, C) of type W, scale (V) or null (ones), wpe (n_ctx, C) or null (not added), out (N, C)
//
//   encoder_rows: one block per row, one thread per ER_WIDTH channels; ids and positions in device memory, wte in any
//       weight dtype
//
// learn/embedding/encoder.cu embeds whole sequences from position 0 on. In this kernel each token has its own position,
// which is read from device memory, so that a CUDA graph can begin with the kernel. If an id or a position is outside
// its table, neither table is read, and the row of out becomes NaN.
//
// Grid (N), block (any).
#include "lib/overlap.cuh"
#include "lib/storage.cuh"

#ifndef ER_WIDTH  // channels per thread: 1, 2 or 4, a divisor of C; all arrays are aligned to a vector
#define ER_WIDTH 4
#endif

#ifndef ER_FACTOR  // factor for the rows of wte
#define ER_FACTOR 1.0f
#endif

struct __align__(4 * ER_WIDTH) Floats {
    float v[ER_WIDTH];
};

// Launched by operation (variant): encoder_rows (rows)
extern "C" __global__ void encoder_rows(
    const int* ids,                   // (N)
    const int* position,              // (N)
    const W* __restrict__ wte,        // (V, C)
    const float* __restrict__ scale,  // (V), or null for all ones
    const float* __restrict__ wpe,    // (n_ctx, C), or null to add nothing
    float* out,                       // (N, C)
    int C, int V, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int id = __ldcg(ids + n), at = __ldcg(position + n);
    const bool inside = 0 <= id && id < V && 0 <= at && at < n_ctx;
    const W* const token = wte + (inside ? (long long)id * C : 0);
    const float* const place = wpe ? wpe + (inside ? (long long)at * C : 0) : nullptr;
    const float factor = inside ? (scale ? scale[id] * ER_FACTOR : ER_FACTOR) : __int_as_float(0x7fffffff);
    for (int c = threadIdx.x * ER_WIDTH; c < C; c += blockDim.x * ER_WIDTH) {
        const Vec<W, ER_WIDTH> a = Vec<W, ER_WIDTH>::load(token + c);
        float x[ER_WIDTH];
        a.unpack(x);
        Floats y;
        if (place) {
            const Floats b = *reinterpret_cast<const Floats*>(place + c);
#pragma unroll
            for (int e = 0; e < ER_WIDTH; ++e) y.v[e] = b.v[e] + x[e] * factor;
        } else {
#pragma unroll
            for (int e = 0; e < ER_WIDTH; ++e) y.v[e] = x[e] * factor;
        }
        *reinterpret_cast<Floats*>(out + n * C + c) = y;
    }
}
