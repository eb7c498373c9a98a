// Conversion of rows of float to two float16 parts and a scale per row, the operands of the products with float
// accuracy (lib/hi_lo.cuh describes the format):
//
//   split_rows: one warp per row: the scale from the largest magnitude, then both parts. The warp reads the row twice,
//       the second time mostly from the cache. Shuffles find the largest finite magnitude. Infinity and NaN stay in hi
//       and do not affect the scale.
//       x (rows, K) -> parts (2, rows, K), hi and then lo, and scale (rows)
//   join_rows: the inverse of split_rows, for some rows of a matrix. out[i] = row index[i], as float
//
// split_rows: block (32 * SPLIT_ROWS), grid (ceil(rows / SPLIT_ROWS)). join_rows: any block, grid (rows of out).
// SPLIT_WIDTH divides K; x and out are aligned to SPLIT_WIDTH floats, parts to SPLIT_WIDTH halves.
#define STORAGE_FP16 1
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/hi_lo.cuh"

#ifndef SPLIT_WIDTH  // elements per load: 1, 2 or 4
#define SPLIT_WIDTH 4
#endif
#ifndef SPLIT_ROWS  // rows per block
#define SPLIT_ROWS 4
#endif
#ifndef SPLIT_UNIT  // the scale of all rows, which is then not stored; 0: a scale for each row
#define SPLIT_UNIT 0.0f
#endif

constexpr int STEP = 32 * SPLIT_WIDTH;

// Launched by operation (variant): hi_lo (split rows)
extern "C" __global__ void __launch_bounds__(32 * SPLIT_ROWS) split_rows(
    const float* x,  // (rows, K)
    T* parts,        // (2, rows, K)
    float* scale,    // (rows)
    int rows, int K) {
    let_next_start();
    wait_for_previous();
    const long long row = (long long)blockIdx.x * SPLIT_ROWS + threadIdx.x / 32;
    if (row >= rows) return;  // all lanes of a warp have the same row
    const int first = threadIdx.x % 32 * SPLIT_WIDTH;
    x += row * K;
    parts += row * K;

    float largest = 0.0f;
#pragma unroll 4
    for (int k = first; SPLIT_UNIT == 0.0f && k < K; k += STEP) {
        float v[SPLIT_WIDTH];
        load_fresh<float, SPLIT_WIDTH>(x + k).unpack(v);
#pragma unroll
        for (int e = 0; e < SPLIT_WIDTH; ++e) largest = fmaxf(largest, fabsf(v[e]) < INFINITY ? fabsf(v[e]) : 0.0f);
    }
    const float unit = SPLIT_UNIT == 0.0f ? scale_of(lanes_max<32>(largest)) : SPLIT_UNIT;
    const float per_unit = inverse_of(unit);
    if (SPLIT_UNIT == 0.0f && first == 0) scale[row] = unit;

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

// Launched by operation (variant): take (join rows)
extern "C" __global__ void join_rows(
    const T* parts,      // (2, rows, K)
    const float* scale,  // (rows)
    const int* index,    // (gridDim.x): indices of rows of the matrix
    float* out,          // (gridDim.x, K)
    int rows, int K) {
    let_next_start();
    wait_for_previous();
    const long long row = __ldcg(index + blockIdx.x);
    const float unit = __ldcg(scale + row);
    parts += row * K;
    for (int k = threadIdx.x * SPLIT_WIDTH; k < K; k += blockDim.x * SPLIT_WIDTH) {
        float high[SPLIT_WIDTH], low[SPLIT_WIDTH];
        load_fresh<T, SPLIT_WIDTH>(parts + k).unpack(high);
        load_fresh<T, SPLIT_WIDTH>(parts + (long long)rows * K + k).unpack(low);
        join(high, low, unit);
        Vec<float, SPLIT_WIDTH>::store(out + (long long)blockIdx.x * K + k, high);
    }
}
