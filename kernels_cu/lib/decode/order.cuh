// The order of additions of a product for decoding on tensor cores (mma.sync; sm_80 and newer), shared by the kernels
// for few and for many rows: an output has the same bits alone and in any batch.
//
//   out[m, n] = sum over k of x[m, k] w[n, k]       x (M, K) float, w (N, K) of type W, K contiguous
//
//   terms   x is the sum of two numbers of the mma's type (lib/terms.cuh): with bfloat16 weights of bfloat16, 16 bits;
//           with float16 and FP8 weights of float16, 22 bits; with float weights of tf32, 22 bits. With two-part
//           weights x is two-part, too (lib/two_part.cuh), with one scale for all rows. In an mma the terms are two
//           rows of x, whose products with w have separate sums. With TERM_COUNT 1, x is rounded to the first one
//   step    8 of K (float weights) or 16, in one mma
//   split   `split_units(K)` units of 128 of K. Its steps are added in the tensor cores, in order. These truncate sums
//           instead of rounding them, which is far less than weights of 16 bits are rounded by. Float and two-part
//           weights, which also have two terms: a chunk of K is added there, from 0 on, of w_low and of w_high by
//           themselves, and such sums, high + low, outside of them. The split is the sum of x_high plus that of x_low
//   total   ((split 0 + split 1) + split 2) + ..., of at most 8 splits
//
// Weights in blocks of GGUF (lib/decode/mma_gguf.cuh): what a split has of a block of 256 codes times their scales of 6
// bits, or a sub-block of codes, is added in the tensor cores, from 0 on; that sum times the scale of float16 is added
// to the split outside of them, and so, before that of 256 codes and after that of a unit of others, is that of the
// minimums of a block or a unit, of both terms by themselves. The total is that of the first half of the splits, 0 to
// 3, plus that of the others, so that two blocks of threads can have a half each and exchange one sum.
//
// FP8 weights are converted to float16, which represents all of them. Infinity in x gives NaN. Zeros after K do not
// change a sum.
//
// Either operand can be the A of an mma, with 16 rows, and the other one B, with 8 columns. As A, w has 16 columns in a
// tile, or 8 with both of their terms; x has 8 rows with both of theirs. As B, w has 8 columns, and x 4 rows with both
// terms, or with blocks of GGUF and x in one term 8. Neither that nor the place of an output in its tile changes its
// bits. Lane 4 g + t has the values at t of rows
// g and g + 8 of A and of column g of B, and the sums
//
//   c[0], c[1] = row g, columns 2t, 2t + 1        c[2], c[3] = row g + 8
//
// A chunk is 64 bytes of each column of w, or of each part of it. A lane loads 16 of them, at 16 t, and x at the same
// k. The values of a step are neighbours in these vectors: along K an mma may take values in any order, provided that A
// and B use the same one. Neither operand needs ldmatrix. Blocks of GGUF are packed in the order of an mma, and x is
// stored so.
//
// The including file selects T and W (lib/storage.cuh) and includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"
#include "lib/terms.cuh"
#include "lib/two_part.cuh"

namespace order {

constexpr bool FLOATS = sizeof(W) == 4;
#if defined(STORAGE_BF16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
constexpr bool BRAIN = true;                // of the mma
#else
constexpr bool BRAIN = false;
#endif
#if defined(WEIGHT_TWO_PART)
constexpr bool TWO_PART = true;
#else
constexpr bool TWO_PART = false;
#endif
constexpr int KIND = TWO_PART ? TWO_PART_TERMS : BRAIN ? BF16_TERMS : FP16_TERMS;  // of the terms of x, if not tf32
constexpr int PARTS = TWO_PART ? 2 : 1;     // of w in memory
#if defined(WEIGHT_GGUF)
constexpr bool BLOCKS = true;               // of GGUF (lib/decode/mma_gguf.cuh)
#else
constexpr bool BLOCKS = false;
#endif
constexpr int WIDTH = BLOCKS ? 8 : 16 / sizeof(W);  // values of a column that a lane has of a chunk
constexpr int CHUNK = 4 * WIDTH;            // of K: 16, 32, or 64 with FP8
constexpr int STEP = FLOATS ? 8 : 16;       // of K
constexpr int STEPS = CHUNK / STEP;         // of a chunk
constexpr int TERMS = BLOCKS ? TERM_COUNT : 2;      // of x, in an mma; the second one can be zero
static_assert(TERM_COUNT == 2 || !(FLOATS || TWO_PART), "x is rounded for weights of one term");
constexpr int UNIT = 128, MOST_SPLITS = 8;  // of K
constexpr int HALF_SPLITS = BLOCKS ? MOST_SPLITS / 2 : MOST_SPLITS;  // whose sums are added to each other first

__host__ __device__ constexpr int units(int K) { return (K + UNIT - 1) / UNIT; }
__host__ __device__ constexpr int split_units(int K) { return (units(K) + MOST_SPLITS - 1) / MOST_SPLITS; }
__host__ __device__ constexpr int splits(int K) { return (units(K) + split_units(K) - 1) / split_units(K); }
__host__ __device__ constexpr int split_length(int K) { return UNIT * split_units(K); }  // the last one may be shorter

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
    W::widen(bytes, v);
    first = pack2_fp16(v[0], v[1]), second = pack2_fp16(v[2], v[3]);
#else
    first = spread<0, 1>(bytes), second = spread<2, 3>(bytes);
#endif
}

// The sum of what was computed with a high and with a low term.
__device__ __forceinline__ float joined(float high, float low) {
    if constexpr (TERM_COUNT == 1) return high;
    return TWO_PART ? fmaf(low, 1.0f / LOW, high) : high + low;
}

// A sum with the scale of its column, its bias, and with two-part weights the scale of x.
__device__ __forceinline__ float finished(float sum, float scale, float x_scale, float bias) {
    if constexpr (TWO_PART) {  // the smaller one first, as in lib/two_part.cuh
        sum *= fminf(scale, x_scale), scale = fmaxf(scale, x_scale);
    }
    return fmaf(sum, scale, bias);
}

constexpr int TILE_OCTETS = FLOATS || TWO_PART ? 1 : 2;  // eights of columns in a tile in which w is A
constexpr int TILE_VECTORS = FLOATS ? 1 : 2;             // of a lane, of a chunk of such a tile

// A lane's part of a chunk of a tile of w, as A: rows g and g + 8 are two columns, or the terms of column g.
struct Columns {
    unsigned value[STEPS][4];

    Columns() = default;

    // From the vectors of columns g and g + 8, or of the parts of column g. Of float weights, `first` is column g.
    __device__ __forceinline__ Columns(const uint4& first, const uint4& last) {
        const unsigned words[2][4] = {{first.x, first.y, first.z, first.w}, {last.x, last.y, last.z, last.w}};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (FLOATS) {
                    const float weight = __int_as_float((int)words[0][2 * s + half]);
                    split_tf32(weight, value[s][2 * half], value[s][2 * half + 1]);
                } else if constexpr (sizeof(W) == 1) {
                    convert_fp8(words[half][s], value[s][half], value[s][half + 2]);
                } else {
                    value[s][half] = words[half][2 * s], value[s][half + 2] = words[half][2 * s + 1];
                }
            }
        }
    }
};

constexpr int TILE_ROWS = 8 / TERMS;  // of x, where it is B

// A lane's part of a chunk of TILE_ROWS rows of x as B: a term of row g / 2, the high one for even g.
struct Rows {
    unsigned value[STEPS][2];

    // From the terms, at the lane's first value of the chunk: WIDTH values of 16 bits each, aligned to 16 bytes;
    // `distance` bytes from the high to the low ones.
    __device__ __forceinline__ void load(const char* high, int distance) {
        const uint4* from = reinterpret_cast<const uint4*>(high + threadIdx.x / 4 % TERMS * distance);
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {  // 16 bytes are two steps
            const uint4 v = from[s / 2];
            value[s][0] = v.x, value[s][1] = v.y, value[s + 1][0] = v.z, value[s + 1][1] = v.w;
        }
    }

    // For float weights, from four floats, aligned to 16 bytes.
    __device__ __forceinline__ void load(const float* x) {
        const float4 v = *reinterpret_cast<const float4*>(x);
        const float floats[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned high, low;
            split_tf32(floats[i], high, low);
            value[i / 2][i % 2] = threadIdx.x / 4 % 2 ? low : high;
        }
    }
};

// The steps of a chunk.
__device__ __forceinline__ void multiply(float (&c)[4], const Columns& w, const Rows& x) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if constexpr (FLOATS) mma_tf32(c, w.value[s], x.value[s]);
        else if constexpr (BRAIN) mma_bf16(c, w.value[s], x.value[s]);
        else mma_fp16(c, w.value[s], x.value[s]);
    }
}

// Adds a chunk to the sums of its split, of a tile in which x is B: of both terms of row t, for columns g and g + 8.
__device__ __forceinline__ void add_chunk(float (&sum)[4], const Columns& w, const Rows& x) { multiply(sum, w, x); }

// The same for column g, of weights with two terms.
__device__ __forceinline__ void add_chunk(float (&sum)[2], const Columns& w, const Rows& x) {
    float part[4] = {};
    multiply(part, w, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += joined(part[i], part[2 + i]);
}

}  // namespace order
