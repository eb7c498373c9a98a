// Conversion of weights into the dtype and layout that products read.
//
//   w (R, C) of type From -> out = T(w), (R, C), or with STORE_TRANSPOSED the transpose of T(w), (C, R)
//
//   store_weights: converts weights of a checkpoint to another dtype, or transposes them to (N, K)
//
// From is float, with FROM_FP16 __half, with FROM_BF16 __nv_bfloat16. Numbers are rounded to nearest even.
//
// A block moves 32 x 32 numbers through shared memory: in either layout, a warp reads and writes 32 neighbouring
// numbers. Rows of shared memory are padded by one number, so that the numbers of a column are in different banks.
//
// grid (ceil(R / 32) * ceil(C / 32)), block (32, 8)
#include "lib/storage.cuh"

#if defined(FROM_FP16)
#include <cuda_fp16.h>
typedef __half From;
__device__ __forceinline__ float number(From value) { return __half2float(value); }
#elif defined(FROM_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 From;
__device__ __forceinline__ float number(From value) { return __bfloat162float(value); }
#else
typedef float From;
__device__ __forceinline__ float number(From value) { return value; }
#endif

#ifndef STORE_TRANSPOSED
#define STORE_TRANSPOSED 0
#endif

constexpr int TILE = 32;

// Launched by operation (variant): store (store)
extern "C" __global__ void store_weights(
    const unsigned char* __restrict__ w,  // (R, C) of From
    T* __restrict__ out,                  // (R, C) or (C, R)
    int R, int C) {
    __shared__ float tile[TILE][TILE + 1];
    const int across = (C + TILE - 1) / TILE;
    const int row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE, x = threadIdx.x;
    const From* from = reinterpret_cast<const From*>(w);
    for (int y = threadIdx.y; y < TILE && row + y < R; y += blockDim.y) {
        if (column + x < C) tile[y][x] = number(from[(long long)(row + y) * C + column + x]);
    }
    __syncthreads();
#if STORE_TRANSPOSED
    for (int y = threadIdx.y; y < TILE && column + y < C; y += blockDim.y) {
        if (row + x < R) narrow_to(out[(long long)(column + y) * R + row + x], tile[x][y]);
    }
#else
    for (int y = threadIdx.y; y < TILE && row + y < R; y += blockDim.y) {
        if (column + x < C) narrow_to(out[(long long)(row + y) * C + column + x], tile[y][x]);
    }
#endif
}
