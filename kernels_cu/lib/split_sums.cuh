// Split sums: an unfinished matrix product. For every output, up to 8 sums are stored, one for each split (a contiguous
// range of K), but not yet added up. matmul/decode/ffn_mma.cu and matmul/decode/ffn_mma_gguf.cu store split sums. The
// next kernels add the split sums to the residual stream x when they load x; the result has the same bits as with
// AddSums of lib/decode/epilogues.cuh.
#pragma once
#include "lib/common.cuh"
#include "lib/fresh.cuh"

#ifndef SUMS_HALF  // splits per half of the splits; each half is added up first (order::HALF_SPLITS)
#if defined(WEIGHT_GGUF)
#define SUMS_HALF 4
#else
#define SUMS_HALF 8
#endif
#endif

template <int COUNT, int X>
struct SplitSums {  // sums of X neighbouring outputs over splits (ranges of K), and scales of the outputs
    float of[COUNT ? COUNT : 1][X], scale[X];

    // Loads the sums of X outputs. `from`: address of the first output's sum over split 0, in an array (COUNT, values).
    // scales: address of the first output's scale, or null.
    __device__ __forceinline__ void load(const float* from, long long values, const float* scales) {
#pragma unroll
        for (int p = 0; p < COUNT; ++p) load_fresh<float, X>(from + p * values).unpack(of[p]);
#pragma unroll
        for (int e = 0; e < X; ++e) scale[e] = 1.0f;
        if (scales) Vec<float, X>::load(scales).unpack(scale);
    }

    __device__ __forceinline__ float added_to(float x, int e) const {
        float halves[2] = {};
#pragma unroll
        for (int p = 0; p < COUNT; ++p) halves[p / SUMS_HALF] += of[p][e];
        const float total = SUMS_HALF < 8 ? halves[0] + halves[1] : halves[0];
        return COUNT ? x + fmaf(total, scale[e], 0.0f) : x;
    }
};
