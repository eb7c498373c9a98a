// Short convolution of LFM2: in each channel, values u of the last L tokens are added, each times a weight.
//
//   u(t) = B(t) x(t)     y(t) = C(t) (bias + taps_0 u(t - L + 1) + ... + taps_(L - 1) u(t))
//
//   bcx (M, 3C): a row is [B | C | x]     taps (C, L)     y (M, C)     k (n, n_ctx, C) of type KV: the kv_cache with u
//
//   short_conv: for decoding and prompts; y is float, or with CONV_OPERAND 16-bit terms (lib/operands.cuh)
//   short_conv_narrow: for prompts; y has the 16-bit type T of u in the kv_cache
//
// Row m belongs to sequence row[m], at position[m]. A thread computes CONV_WIDTH channels of a row. It stores u of its
// row in the kv_cache, and needs u of the L - 1 positions before:
//
//   rows ..., m - 2, m - 1, m of one sequence, at successive positions     u = B x of these rows
//   an earlier position, which an earlier launch has computed              u from the kv_cache
//   before position 0                                                      0
//
// u is rounded to the type of the kv_cache in all cases, and the terms of a sum are added in the order of positions.
// So y has the same bits whether a prompt is computed at once, in pieces, or token by token, next to any other rows.
// No thread loads from the kv_cache what another thread stores. Rows outside the kv_cache store nothing there.
//
// grid (M, ceil(C / (blockDim.x * CONV_WIDTH))), block (any multiple of 32).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"

#ifndef CONV_L  // L, the number of terms of a sum
#define CONV_L 3
#endif
#ifndef CONV_WIDTH  // channels of a thread: gcd(4, C)
#define CONV_WIDTH 4
#endif
#ifndef CONV_OPERAND  // format of y: a kind of terms (16-bit parts of floats, lib/operands.cuh); 0: no terms
#define CONV_OPERAND 0
#endif

typedef Vec<KV, CONV_WIDTH> Cached;

// Returns u of row m, for channels c to c + CONV_WIDTH - 1.
__device__ __forceinline__ Cached product_of(const float* bcx, long long m, int c, int C) {
    const float* const from = bcx + m * 3 * C + c;
    float b[CONV_WIDTH], x[CONV_WIDTH];
    load_fresh_floats<CONV_WIDTH>(from, b);
    load_fresh_floats<CONV_WIDTH>(from + 2 * C, x);
#pragma unroll
    for (int e = 0; e < CONV_WIDTH; ++e) b[e] *= x[e];
    return Cached::pack(b);
}

// Calls store(m, c, y) with the results of row m from channel c on.
template <typename Store>
__device__ __forceinline__ void convolve(
    const float* bcx, const float* taps, const float* bias, const int* row, const int* position, KV* k, int C, int B,
    int n_ctx, Store store) {
    const int m = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * CONV_WIDTH;
    float weights[CONV_L][CONV_WIDTH], y[CONV_WIDTH];
#pragma unroll
    for (int e = 0; e < CONV_WIDTH && c < C; ++e) {  // constants, which are loaded before the previous kernel ends
        y[e] = bias ? __ldg(bias + c + e) : 0.0f;
#pragma unroll
        for (int j = 0; j < CONV_L; ++j) weights[j][e] = __ldg(taps + (c + e) * CONV_L + j);
    }
    let_next_start();
    wait_for_previous();
    if (c >= C) return;
    const int b = __ldcg(row + m), at = __ldcg(position + m);
    const bool cached = k && b >= 0 && b < B && at >= 0 && at < n_ctx;
    KV* const place = k + ((long long)b * n_ctx + at) * C + c;
    Cached u[CONV_L];  // u[j] is j positions before this row
    bool here = true;  // whether row m - j has this position
#pragma unroll
    for (int j = 0; j < CONV_L; ++j) {
        here = here && m >= j && __ldcg(row + m - j) == b && __ldcg(position + m - j) == at - j;
        const float zeros[CONV_WIDTH] = {};
        if (here) u[j] = product_of(bcx, m - j, c, C);
        else if (cached && at >= j) u[j] = load_fresh<KV, CONV_WIDTH>(place - (long long)j * C);
        else u[j] = Cached::pack(zeros);
    }
    if (cached) *reinterpret_cast<typename Cached::Raw*>(place) = u[0].raw;
#pragma unroll
    for (int j = 0; j < CONV_L; ++j) {
        float term[CONV_WIDTH];
        u[CONV_L - 1 - j].unpack(term);
#pragma unroll
        for (int e = 0; e < CONV_WIDTH; ++e) y[e] = fmaf(weights[j][e], term[e], y[e]);
    }
    float gate[CONV_WIDTH];
    load_fresh_floats<CONV_WIDTH>(bcx + (long long)m * 3 * C + C + c, gate);
#pragma unroll
    for (int e = 0; e < CONV_WIDTH; ++e) y[e] *= gate[e];
    store(m, c, y);
}

// Launched by operation (variant): short_conv (short_conv)
extern "C" __global__ void short_conv(
    const float* bcx,                // (M, 3C)
    const float* __restrict__ taps,  // (C, L)
    const float* __restrict__ bias,  // (C), or null
    const int* row,                  // (M)
    const int* position,             // (M)
    KV* k,                           // (B, n_ctx, C), or null
    float* y,                        // (M, C)
    float y_scale,                   // scale of y, used if CONV_OPERAND selects hi/lo terms
    int C, int B, int n_ctx) {
    convolve(bcx, taps, bias, row, position, k, C, B, n_ctx, [&](int m, int c, const float (&v)[CONV_WIDTH]) {
        store_row<CONV_OPERAND>(y, y_scale, m, c, gridDim.x, C, v);
    });
}

// Launched by operation (variant): short_conv (short_conv)
extern "C" __global__ void short_conv_narrow(
    const float* bcx,                // (M, 3C)
    const float* __restrict__ taps,  // (C, L)
    const float* __restrict__ bias,  // (C), or null
    const int* row,                  // (M)
    const int* position,             // (M)
    KV* k,                           // (B, n_ctx, C), or null
    T* y,                            // (M, C)
    int C, int B, int n_ctx) {
    convolve(bcx, taps, bias, row, position, k, C, B, n_ctx, [&](int m, int c, const float (&v)[CONV_WIDTH]) {
        store_row<0>(y, 1.0f, m, c, gridDim.x, C, v);
    });
}
