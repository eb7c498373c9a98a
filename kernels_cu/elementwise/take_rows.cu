// Gathers rows by index: out[i] = x[index[i]].
//
//   take_rows: one block per row of out; gathers rows of a matrix by index
//
// grid (rows of out), block (any). TAKE_WIDTH divides C, the number of columns; x and out are aligned to TAKE_WIDTH
// elements.
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

#ifndef TAKE_WIDTH  // elements per load, at most 16 bytes
#define TAKE_WIDTH 4
#endif

// Launched by operation (variant): take (rows)
extern "C" __global__ void take_rows(
    const T* x,        // (rows, C)
    const int* index,  // (gridDim.x): indices of rows of x
    T* out,            // (gridDim.x, C)
    int C) {
    typedef typename Vec<T, TAKE_WIDTH>::Raw Raw;
    let_next_start();
    wait_for_previous();
    const T* from = x + (long long)__ldcg(index + blockIdx.x) * C;
    T* to = out + (long long)blockIdx.x * C;
    for (int c = threadIdx.x * TAKE_WIDTH; c < C; c += blockDim.x * TAKE_WIDTH)
        *reinterpret_cast<Raw*>(to + c) = load_fresh<T, TAKE_WIDTH>(from + c).raw;
}
