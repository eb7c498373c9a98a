// Split sums, an incomplete product: matmul/decode/ffn_mma.cu and matmul/decode/ffn_mma_gguf.cu store the sum of each
// split of K for every output. The next kernels add these sums to x as they load x, in the order and with the bits of
// lib/decode/epilogues.cuh.
#pragma once
#include "lib/common.cuh"
#include "lib/fresh.cuh"

#ifndef SUMS_HALF  // splits per half; the splits of a half are added first (order::HALF_SPLITS)
#if defined(WEIGHT_GGUF)
#define SUMS_HALF 4
#else
#define SUMS_HALF 8
#endif
#endif

template <int COUNT, int X>
struct SplitSums {  // split sums of X neighbouring outputs, and their scales
    float of[COUNT ? COUNT : 1][X], scale[X];

    // Loads the sums of X outputs. from: address of the first output in the first split of sums (COUNT, values).
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
