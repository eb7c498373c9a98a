// Token plus position embedding, a row a token: out[n] = wte[ids[n]] + wpe[position[n]].
//
//   ids, position (N), wte (V, C) of W, with scale: times scale[id], wpe (n_ctx, C), out (N, C)
//
// embedding/encoder.cu takes whole sequences from position 0 on; here tokens and positions are in device memory, each with its
// own, so that a CUDA graph can begin with it. An id or a position outside its table is no address: its row becomes
// NaN, so that it is seen.
//
// A thread a vector of ER_WIDTH channels. Grid (N), block (any).
#include "lib/overlap.cuh"
#include "lib/storage.cuh"

#ifndef ER_WIDTH  // channels of a thread: 1, 2 or 4, dividing C; all arrays aligned to it
#define ER_WIDTH 4
#endif

struct __align__(4 * ER_WIDTH) Floats {
    float v[ER_WIDTH];
};

extern "C" __global__ void encoder_rows(
    const int* ids,                   // (N)
    const int* position,              // (N)
    const W* __restrict__ wte,        // (V, C)
    const float* __restrict__ scale,  // (V), or null: all ones
    const float* __restrict__ wpe,    // (n_ctx, C)
    float* out,                       // (N, C)
    int C, int V, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int id = __ldcg(ids + n), at = __ldcg(position + n);
    const bool inside = 0 <= id && id < V && 0 <= at && at < n_ctx;
    const W* const token = wte + (inside ? (long long)id * C : 0);
    const float* const place = wpe + (inside ? (long long)at * C : 0);
    const float factor = inside ? (scale ? scale[id] : 1.0f) : __int_as_float(0x7fffffff);
    for (int c = threadIdx.x * ER_WIDTH; c < C; c += blockDim.x * ER_WIDTH) {
        const Vec<W, ER_WIDTH> a = Vec<W, ER_WIDTH>::load(token + c);
        const Floats b = *reinterpret_cast<const Floats*>(place + c);
        float x[ER_WIDTH];
        a.unpack(x);
        Floats y;
#pragma unroll
        for (int e = 0; e < ER_WIDTH; ++e) y.v[e] = b.v[e] + x[e] * factor;
        *reinterpret_cast<Floats*>(out + n * C + c) = y;
    }
}
