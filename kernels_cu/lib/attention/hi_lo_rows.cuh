// Functions for hi/lo numbers (lib/hi_lo.cuh) in attention/prompt/mma_hi_lo.cu and
// attention/prompt/wgmma_hi_lo.cu: splitting floats into two parts in the operand registers of a product, and
// storing a warp's rows. The including file defines ATT_ONE_SCALE and includes lib/attention/scores.cuh and
// lib/sm80.cuh.
//
// A warp has 16 rows. Lane 4 g + t (t < 4) holds columns 8 n + 2t and 8 n + 2t + 1 (n = 0, 1, ...) of rows g and g + 8.
#pragma once

#include "lib/attention/transpose.cuh"

constexpr float CROSS = 1.0f / 2048;  // factor of lo in hi + lo / 2048
constexpr int COLUMNS = SIZE / 8;

// Represents two floats as hi + lo / 2048. Registers `hi` and `lo` hold one float16 number per float.
struct Split {
    unsigned hi, lo;

    __device__ __forceinline__ Split(float a, float b) {
        float near[2];
        hi = pack2(a, b);
        Vec<T, 2>{hi}.unpack(near);
        lo = pack2((a - near[0]) * LOW, (b - near[1]) * LOW);
    }
};

// Stores the scales of the first `left` of the warp's rows in `to`, unless `to` is null. The scale of a row is `top`,
// the largest scale of the keys that the row sees, or `one` with ATT_ONE_SCALE.
__device__ __forceinline__ void store_scales(const float (&top)[2], float* to, float one, int left) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        if (to && lane % 4 == 0 && row < left) to[row] = ATT_ONE_SCALE ? one : top[r];
    }
}

// Divides the warp's rows of `out` by their sums `sum`, of which each lane holds a part. Stores the first `left` rows
// at `to`. The low part of a value is stored `part` elements after its high part.
__device__ __forceinline__ void store_rows(const float (&out)[COLUMNS][4], const float (&sum)[2], T* to, long long part,
                                           long long stride, int left) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = 1.0f / lanes_sum<4>(sum[r]);
        const int row = 8 * r + g;
#pragma unroll
        for (int piece = 0; piece < SIZE / 32; ++piece) {
            unsigned v[4], w[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float(&c)[4] = out[4 * piece + n];
                const Split both(c[2 * r] * factor, c[2 * r + 1] * factor);
                v[n] = both.hi;
                w[n] = both.lo;
            }
            turn(v, t);
            turn(w, t);
            T* at = to + row * stride + 32 * piece + 8 * t;
            if (row < left) {
                *reinterpret_cast<uint4*>(at) = {v[0], v[1], v[2], v[3]};
                *reinterpret_cast<uint4*>(at + part) = {w[0], w[1], w[2], w[3]};
            }
        }
    }
}
