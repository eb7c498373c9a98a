// The order of additions of a product for decoding on tensor cores (mma.sync; sm_80 and newer), shared by the kernels
// for few and for many rows: an output has the same bits alone and in any batch.
//
//   out[m, n] = sum over k of x[m, k] w[n, k]       x (M, K) float, w (N, K) of type W, K contiguous
//
//   step    8 of K (float weights) or 16, in one mma
//   part    the steps of 64 bytes of a column, 16 to 64 of K, for each product of terms: they are added in the tensor
//           cores, from 0 on. These truncate sums instead of rounding them, and take a step only when the one before
//           is done: therefore parts are short. The products of terms are then added, small ones first:
//             bfloat16 weights         (w x_low + w x_middle) + w x_high
//             float16, FP8 weights     w x_low + w x_high
//             float weights            (w_low x_high + w_high x_low) + w_high x_high
//   split   `split_units(K)` units of 128 of K. Its parts are added in order: ((0 + part 0) + part 1) + ...
//   total   ((split 0 + split 1) + split 2) + ..., of at most 8 splits
//
// Terms: x is the sum of numbers of the mma's type, each the nearest to what is left: three of bfloat16 have the 24
// bits of a float, two of float16 have 22, down to 2^-24. Float weights and x have two terms of tf32, 22 bits or more;
// the product of both low ones is left out. FP8 weights are converted to float16, which represents all of them. With
// float16 x may have magnitudes up to 65504. Infinity in x gives NaN. Zeros after K do not change a sum.
//
// A tile is 16 columns of w, the rows of A of an mma, by 8 rows of x, the columns of B. Which row or column of a tile
// an output is in does not change its bits. Lane 4 g + t has the values at t of columns g and g + 8 of w and of row g
// of x, and the sums
//
//   c[0], c[1] = rows 2t, 2t + 1 of column g        c[2], c[3] = rows 2t, 2t + 1 of column g + 8
//
// A chunk is the 64 bytes of each column. A lane loads 16 of them, at 16 t, and x at the same k. The values of a step
// are neighbours in these vectors: along K an mma may take values in any order, provided that A and B use the same one.
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
#if defined(STORAGE_BF16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
constexpr int TERMS = 3;                    // of x
#else
constexpr int TERMS = 2;
#endif
constexpr int UNIT = 128, MOST_SPLITS = 8;  // of K

__host__ __device__ constexpr int units(int K) { return (K + UNIT - 1) / UNIT; }
__host__ __device__ constexpr int split_units(int K) { return (units(K) + MOST_SPLITS - 1) / MOST_SPLITS; }
__host__ __device__ constexpr int splits(int K) { return (units(K) + split_units(K) - 1) / split_units(K); }
__host__ __device__ constexpr int split_length(int K) { return UNIT * split_units(K); }  // the last one may be shorter

// Rounds two floats to the type of the mma, the first one into the lower half.
__device__ __forceinline__ unsigned narrow2(float first, float second) {
    return TERMS == 3 ? pack2_bf16(first, second) : pack2_fp16(first, second);
}

// The terms of two values, the first one in the lower half; the highest term is terms[TERMS - 1].
__device__ __forceinline__ void split_pair(float first, float second, unsigned (&terms)[TERMS]) {
#pragma unroll
    for (int i = TERMS - 1; i >= 0; --i) {
        terms[i] = narrow2(first, second);
        if (i == 0) break;
        float rounded[2];
        if (TERMS == 3) unpack2_bf16(terms[i], rounded);
        else unpack2_fp16(terms[i], rounded);
        first -= rounded[0], second -= rounded[1];
    }
}

// The terms of a value for tf32, of which tensor cores read the upper 19 bits: the nearest number, then the rest.
__device__ __forceinline__ void split_tf32(float value, unsigned& high, unsigned& low) {
    high = ((unsigned)__float_as_int(value) + 0x1000u) & 0xffffe000u;
    low = (unsigned)__float_as_int(value - __int_as_float((int)high));
}

// Four FP8 bytes, lowest first, as two pairs of float16.
__device__ __forceinline__ void convert_fp8(unsigned bytes, unsigned& first, unsigned& second) {
#if defined(WEIGHT_E4M3) && __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"((unsigned short)bytes));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"((unsigned short)(bytes >> 16)));
#elif defined(WEIGHT_E4M3)
    float v[4];
    widen(bytes, v);
    first = pack2_fp16(v[0], v[1]), second = pack2_fp16(v[2], v[3]);
#else
    first = spread<0, 1>(bytes), second = spread<2, 3>(bytes);
#endif
}

// A lane's part of a chunk of 16 columns of w: its vectors of columns g and g + 8, converted.
struct Columns {
    unsigned high[STEPS][4], low[STEPS][4];  // low: of float weights

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

// A lane's part of a chunk of 8 rows of x, in terms.
struct Rows8 {
    unsigned term[TERMS][STEPS][2];

    // From the terms of row g, at the lane's first value of the chunk: WIDTH values of 16 bits each, aligned to 16
    // bytes; `distance` bytes from a term to the next higher one.
    __device__ __forceinline__ void load(const char* lowest, int distance) {
#pragma unroll
        for (int i = 0; i < TERMS; ++i) {
            const uint4* from = reinterpret_cast<const uint4*>(lowest + i * distance);
#pragma unroll
            for (int s = 0; s < STEPS; s += 2) {  // 16 bytes are two steps
                const uint4 v = from[s / 2];
                term[i][s][0] = v.x, term[i][s][1] = v.y, term[i][s + 1][0] = v.z, term[i][s + 1][1] = v.w;
            }
        }
    }

    // For float weights, from four floats of row g, aligned to 16 bytes.
    __device__ __forceinline__ void load(const float* x) {
        const float4 v = *reinterpret_cast<const float4*>(x);
        split_tf32(v.x, term[1][0][0], term[0][0][0]);
        split_tf32(v.y, term[1][0][1], term[0][0][1]);
        split_tf32(v.z, term[1][1][0], term[0][1][0]);
        split_tf32(v.w, term[1][1][1], term[0][1][1]);
    }
};

// A product of terms over the steps of a chunk.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&w)[STEPS][4], const unsigned (&x)[STEPS][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if constexpr (FLOATS) mma_tf32(c, w[s], x[s]);
        else if constexpr (TERMS == 3) mma_bf16(c, w[s], x[s]);
        else mma_fp16(c, w[s], x[s]);
    }
}

// Adds a part of a tile to the sums of its split.
__device__ __forceinline__ void add_part(float (&sum)[4], const Columns& w, const Rows8& x) {
    float part[4], c[4];
    if constexpr (FLOATS) {
        multiply(part, w.low, x.term[1]);
    } else {
        multiply(part, w.high, x.term[0]);
    }
#pragma unroll
    for (int term = FLOATS ? 0 : 1; term < TERMS; ++term) {
        multiply(c, w.high, x.term[term]);
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] += c[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
}

// The same sums for few rows, with fewer mma: the terms of a row are columns of B, PLACES for each row.
constexpr int PLACES = TERMS == 3 ? 4 : 2, PACKED_ROWS = 8 / PLACES;

// A lane's part of a chunk of PACKED_ROWS rows: of row g / PLACES the term g % PLACES, or for one too many the last.
struct PackedRows {
    unsigned value[STEPS][2];

    // From the row's terms, as in Rows8.
    __device__ __forceinline__ void load(const char* lowest, int distance) {
        const int term = min((int)threadIdx.x / 4 % PLACES, TERMS - 1);
        const uint4* from = reinterpret_cast<const uint4*>(lowest + term * distance);
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {
            const uint4 v = from[s / 2];
            value[s][0] = v.x, value[s][1] = v.y, value[s + 1][0] = v.z, value[s + 1][1] = v.w;
        }
    }

    __device__ __forceinline__ void load(const float* x) {
        Rows8 both;
        both.load(x);
        const bool upper = threadIdx.x / 4 % 2;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int i = 0; i < 2; ++i) value[s][i] = upper ? both.term[1][s][i] : both.term[0][s][i];
        }
    }
};

// The row of a lane's sums, or one that does not exist.
__device__ __forceinline__ int packed_row() {
    const int t = threadIdx.x % 4;
    if (TERMS == 2) return t;
    return t % 2 ? PACKED_ROWS : t / 2;
}

// Adds a part to the sums of columns g and g + 8 for the row of the lane.
__device__ __forceinline__ void add_part(float (&sum)[2], const Columns& w, const PackedRows& x) {
    if constexpr (FLOATS) {  // of each column both terms, as two rows of A
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned terms[STEPS][4];
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                terms[s][0] = w.high[s][half], terms[s][1] = w.low[s][half];
                terms[s][2] = w.high[s][half + 2], terms[s][3] = w.low[s][half + 2];
            }
            float c[4];
            multiply(c, terms, x.value);
            sum[half] += (c[3] + c[0]) + c[1];
        }
    } else {
        float c[4];
        multiply(c, w.high, x.value);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float part = c[2 * half] + c[2 * half + 1];
            if constexpr (TERMS == 3) part += __shfl_down_sync(0xffffffffu, c[2 * half], 1);  // the high term
            sum[half] += part;
        }
    }
}

}  // namespace order
