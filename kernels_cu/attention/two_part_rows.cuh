// What attention/mma_two_part.cu and attention/hopper_two_part.cu do alike with two-part numbers (lib/two_part.cuh):
// the division of floats into their parts in the registers of a product, and the store of a warp's rows. The including
// file defines ATT_ONE_SCALE and includes attention/scores.cuh and lib/sm80.cuh.
//
// Lane 4 g + t of a warp has rows g and g + 8 of 16, and of these columns 8 n + 2t and 8 n + 2t + 1.
#pragma once

#include "attention/turn.cuh"

constexpr float CROSS = 1.0f / 2048;  // a unit of lo, in units of hi
constexpr int COLUMNS = SIZE / 8;

// Two floats, each as hi + lo / 2048.
struct Split {
    unsigned hi, lo;

    __device__ __forceinline__ Split(float a, float b) {
        float near[2];
        hi = pack2(a, b);
        Vec<T, 2>{hi}.unpack(near);
        lo = pack2((a - near[0]) * LOW, (b - near[1]) * LOW);
    }
};

// Stores the scales of the warp's rows below `left`, unless `to` is null: the largest that a row has seen, or with
// ATT_ONE_SCALE `one`.
__device__ __forceinline__ void store_scales(const float (&top)[2], float* to, float one, int left) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = 8 * r + lane / 4;
        if (to && lane % 4 == 0 && row < left) to[row] = ATT_ONE_SCALE ? one : top[r];
    }
}

// Divides the warp's rows by their sums, of which each lane has a part, and stores those below `left` at `to`; lo is
// `part` elements further.
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
