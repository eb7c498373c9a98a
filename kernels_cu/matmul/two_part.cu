// Conversion of rows of float to two parts and a scale each, the operands of the products with float accuracy
// (lib/two_part.cuh describes the format):
//
//   x (rows, K) -> parts (2, rows, K), hi and then lo, and scale (rows)
//
// One warp per row. It reads the row twice: for the largest finite magnitude, found by shuffles, and for the parts; the
// second time most of the row is in the cache. Infinity and NaN stay in hi and do not affect the scale.
//
// block (32 * SPLIT_ROWS), grid (ceil(rows / SPLIT_ROWS)). SPLIT_WIDTH divides K; x is aligned to SPLIT_WIDTH floats,
// parts to SPLIT_WIDTH halves.
#ifndef STORAGE_FP16
#define STORAGE_FP16
#endif
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/two_part.cuh"

#ifndef SPLIT_WIDTH  // elements per load: 1, 2 or 4
#define SPLIT_WIDTH 4
#endif
#ifndef SPLIT_ROWS  // rows per block
#define SPLIT_ROWS 4
#endif

constexpr int STEP = 32 * SPLIT_WIDTH;

extern "C" __global__ void __launch_bounds__(32 * SPLIT_ROWS) split_rows(
    const float* x,  // (rows, K)
    T* parts,        // (2, rows, K)
    float* scale,    // (rows)
    int rows, int K) {
    let_next_start();
    wait_for_previous();
    const long long row = (long long)blockIdx.x * SPLIT_ROWS + threadIdx.x / 32;
    if (row >= rows) return;  // the whole warp
    const int first = threadIdx.x % 32 * SPLIT_WIDTH;
    x += row * K;
    parts += row * K;

    float largest = 0.0f;
#pragma unroll 4
    for (int k = first; k < K; k += STEP) {
        float v[SPLIT_WIDTH];
        load_fresh<float, SPLIT_WIDTH>(x + k).unpack(v);
#pragma unroll
        for (int e = 0; e < SPLIT_WIDTH; ++e) largest = fmaxf(largest, fabsf(v[e]) < INFINITY ? fabsf(v[e]) : 0.0f);
    }
    const float unit = scale_of(lanes_max<32>(largest)), per_unit = inverse_of(unit);
    if (first == 0) scale[row] = unit;

#pragma unroll 4
    for (int k = first; k < K; k += STEP) {
        float v[SPLIT_WIDTH], low[SPLIT_WIDTH];
        load_fresh<float, SPLIT_WIDTH>(x + k).unpack(v);
#pragma unroll
        for (int e = 0; e < SPLIT_WIDTH; ++e) v[e] *= per_unit;
        low_parts(v, low);
        Vec<T, SPLIT_WIDTH>::store(parts + k, v);
        Vec<T, SPLIT_WIDTH>::store(parts + (long long)rows * K + k, low);
    }
}
