// The order of additions of a product for decoding on tensor cores (mma.sync; sm_80 and newer), shared by the kernels
// for few and for many rows: an output has the same bits alone and in any batch.
//
//   out[m, n] = sum over k of x[m, k] w[n, k]       x (M, K) float, w (N, K) of type W, K contiguous
//
//   step    8 of K (float weights) or 16, one mma per product of terms:
//             16-bit and FP8 weights   w x_low, then w x_high
//             float weights            w_low x_high, then w_high x_low, then w_high x_high
//   part    32 of K (float weights) or 64: the steps of a part are added in the tensor cores, from 0 on. They truncate
//           sums instead of rounding them, and take a step only when the one before is done: therefore parts are short
//   split   `split_units(K)` units of 128 of K. Its parts are added in order: ((0 + part 0) + part 1) + ...
//   total   ((split 0 + split 1) + split 2) + ..., of at most 8 splits
//
// Terms: x is the sum of two numbers, high = T(x) and low = T(x - high), or for float weights tf32, as is w. FP8 weights
// are converted to bfloat16, which represents all of them. Zeros after K do not change a sum.
//
// A tile is 16 columns of w, the rows of A of an mma, by 8 rows of x, the columns of B. Which row or column of a tile an
// output is in does not change its bits. Lane 4 g + t has the values at t of columns g and g + 8 of w and of row g of x,
// and the sums
//
//   c[0], c[1] = rows 2t, 2t + 1 of column g        c[2], c[3] = rows 2t, 2t + 1 of column g + 8
//
// A chunk is 64 bytes of each column. A lane loads 16 of them, at 16 t, and x at the same k. The values of a step are
// neighbours in these vectors: along K an mma may take values in any order, provided that A and B use the same one.
// Neither operand needs ldmatrix.
//
// The including file selects T and W (lib/storage.cuh) and includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"

namespace order {

constexpr bool FLOATS = sizeof(W) == 4;
constexpr int WIDTH = 16 / sizeof(W);       // values of a column that a lane loads
constexpr int CHUNK = 4 * WIDTH;            // of K: 16, 32, or 64 with FP8
constexpr int STEP = FLOATS ? 8 : 16;       // of K
constexpr int STEPS = CHUNK / STEP;         // of a chunk
constexpr int PART = FLOATS ? 32 : 64;      // of K
constexpr int PART_CHUNKS = PART / CHUNK;   // 2, 2, or 1 with FP8
constexpr int UNIT = 128, MOST_SPLITS = 8;  // of K

__host__ __device__ constexpr int units(int K) { return (K + UNIT - 1) / UNIT; }
__host__ __device__ constexpr int split_units(int K) { return (units(K) + MOST_SPLITS - 1) / MOST_SPLITS; }
__host__ __device__ constexpr int splits(int K) { return (units(K) + split_units(K) - 1) / split_units(K); }
__host__ __device__ constexpr int split_length(int K) { return UNIT * split_units(K); }  // the last one may be shorter

// The terms of two values, the first one in the lower half.
__device__ __forceinline__ void split_pair(float first, float second, unsigned& high, unsigned& low) {
    high = pack2(first, second);
#if defined(STORAGE_BF16)  // without the instructions that would take the pair apart
    const float rounded[2] = {__int_as_float((int)(high << 16)), __int_as_float((int)(high & 0xffff0000u))};
#else
    float rounded[2];
    Vec<T, 2>{high}.unpack(rounded);
#endif
    low = pack2(first - rounded[0], second - rounded[1]);
}

// The terms of a value for tf32, of which tensor cores read the upper 19 bits.
__device__ __forceinline__ void split_tf32(float value, unsigned& high, unsigned& low) {
    high = (unsigned)__float_as_int(value) & 0xffffe000u;
    low = (unsigned)__float_as_int(value - __int_as_float((int)high));
}

// Four FP8 bytes, lowest first, as two pairs of T.
__device__ __forceinline__ void convert_fp8(unsigned bytes, unsigned& first, unsigned& second) {
#if defined(WEIGHT_E5M2) || defined(WEIGHT_E4M3)
    float v[4];
    widen(bytes, v);
    first = pack2(v[0], v[1]);
    second = pack2(v[2], v[3]);
#endif
}

// A lane's part of a chunk of 16 columns of w: its vectors of columns g and g + 8, converted.
struct Columns {
    unsigned high[STEPS][4], low[FLOATS ? STEPS : 1][4];

    __device__ __forceinline__ Columns(const uint4& lower, const uint4& upper) {
        const unsigned words[2][4] = {{lower.x, lower.y, lower.z, lower.w}, {upper.x, upper.y, upper.z, upper.w}};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (FLOATS) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float value = __int_as_float((int)words[half][2 * s + e]);
                        split_tf32(value, high[s][half + 2 * e], low[s][half + 2 * e]);
                    }
                } else if constexpr (sizeof(W) == 1) {
                    convert_fp8(words[half][s], high[s][half], high[s][half + 2]);
                } else {
                    high[s][half] = words[half][2 * s], high[s][half + 2] = words[half][2 * s + 1];
                }
            }
        }
    }
};

// A lane's part of a chunk of 8 rows of x, in two terms.
struct Rows8 {
    unsigned high[STEPS][2], low[STEPS][2];

    // From the terms of row g, at the lane's first value of the chunk: WIDTH values of T each, aligned to 16 bytes.
    __device__ __forceinline__ void load(const void* high_terms, const void* low_terms) {
        static_assert(!FLOATS || STEPS == 2, "with float weights, x is one array of float");
        const uint4 *highs = static_cast<const uint4*>(high_terms), *lows = static_cast<const uint4*>(low_terms);
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {  // 16 bytes are two steps
            const uint4 h = highs[i], l = lows[i];
            high[2 * i][0] = h.x, high[2 * i][1] = h.y, high[2 * i + 1][0] = h.z, high[2 * i + 1][1] = h.w;
            low[2 * i][0] = l.x, low[2 * i][1] = l.y, low[2 * i + 1][0] = l.z, low[2 * i + 1][1] = l.w;
        }
    }

    // For float weights, from four floats of row g, aligned to 16 bytes.
    __device__ __forceinline__ void load(const float* x) {
        const float4 v = *reinterpret_cast<const float4*>(x);
        split_tf32(v.x, high[0][0], low[0][0]);
        split_tf32(v.y, high[0][1], low[0][1]);
        split_tf32(v.z, high[1][0], low[1][0]);
        split_tf32(v.w, high[1][1], low[1][1]);
    }
};

// Adds a chunk of a tile: c starts at 0 with each part.
__device__ __forceinline__ void multiply_add(float (&c)[4], const Columns& w, const Rows8& x) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if constexpr (FLOATS) {
            mma_tf32(c, w.low[s], x.high[s]);
            mma_tf32(c, w.high[s], x.low[s]);
            mma_tf32(c, w.high[s], x.high[s]);
        } else {
            mma(c, w.high[s], x.low[s]);
            mma(c, w.high[s], x.high[s]);
        }
    }
}

}  // namespace order
