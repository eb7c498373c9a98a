// Matrix products of mixtures of experts on tensor cores, for any number of rows, on sm_75 and newer:
//
//   decode_mma_experts: a block multiplies the rows that chose one expert by some columns of this expert's matrix
//
// out[c] = x[c / DECODE_EXPERTS] W[e]^T * scale[e] for choice c of expert e; with DECODE_UP, for two matrices, out[c] =
// silu(x W[e]^T * scale[e]) (x up[e]^T * up_scale[e]). W has the matrices (N, K) of all experts one after the other.
//
//   row of x     0      1      2        experts that rows chose: 0 3, 3 1, 0 1
//   choice       0  1   2  3   4  5
//   tiles        [0: 0 4] [1: 3 5] [3: 1 2]
//
// A block computes the same sums as matmul/decode/mma.cu, in the order of lib/decode/order.cuh. The result of a choice
// therefore has the bits of matmul/decode/mma.cu with this row and this expert's matrix, whatever other rows there are.
// Blocks cannot load weights before the wait for the previous kernel, because an earlier kernel writes the tiles. A
// block loops over tiles and stops at the first one without choices, as all tiles after it have none.
//
// grid (ceil(N / DECODE_COLUMNS), with DECODE_UP ceil(2 N / DECODE_COLUMNS); any number), block (32 * WARPS). The
// Python module `experts` computes the geometry. The size of a row of W is a multiple of 16 bytes.
#ifndef DECODE_NORM
#define DECODE_NORM 0
#endif
#ifndef DECODE_EXPERTS
#define DECODE_EXPERTS 1
#endif
#include "matmul/decode/mma.cuh"

// Launched by operation (variant): experts_gated (experts gated), experts_down (experts down)
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma_experts(
    const float* x,                      // (M, K), or with DECODE_EXPERTS 1 (P, K)
    const int* tiles,                    // (T, 1 + places)
    const W* __restrict__ w,             // (E N, K)
    const float* __restrict__ scale,     // (E N) or null
    const W* __restrict__ up,            // (E N, K), with DECODE_UP
    const float* __restrict__ up_scale,  // (E N) or null
    float* out,                          // (P, N)
    int N, int T, int places) {
    extern __shared__ float4 shared[];
    char* const rows = reinterpret_cast<char*>(shared);
    float* const totals = reinterpret_cast<float*>(rows + Input::BYTES);
    let_next_start();
    wait_for_previous();
    const int shares = (places + DECODE_ROWS - 1) / DECODE_ROWS;  // of a tile
#pragma unroll 1
    for (int i = blockIdx.y; i < T * shares; i += gridDim.y) {
        const int* const tile = tiles + (long long)(i / shares) * (1 + places);
        const ExpertShare<DECODE_ROWS> share(tile, i % shares * DECODE_ROWS, places);
        if (share.expert < 0) return;
        if (share.count == 0) continue;
        const long long first = (long long)share.expert * N;  // the first column of the expert
        Input input{x, nullptr, nullptr, 0.0f, share.count, 0, rows, 1.0f, nullptr, nullptr, {}};
        multiply(w + first * DECODE_K, up + (DECODE_UP ? first * DECODE_K : 0), scale ? scale + first : nullptr,
                 up_scale ? up_scale + first : nullptr, nullptr, 1.0f, input, ToChoices{out, N}, totals, N);
    }
}
