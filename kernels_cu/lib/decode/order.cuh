// The order of additions in matrix products for decoding on tensor cores (mma.sync). The kernels for
// few and for many rows share this order, so an output has the same bits in any batch.
//
//   out[m, n] = sum over k of x[m, k] w[n, k]       x (M, K) float, w (N, K) of type W, K contiguous
//
//   terms   each x is the sum of two numbers of the mma's input type (lib/operands.cuh): for bfloat16 weights bfloat16,
//           which keeps 16 bits (on sm_75 float16); for float16 and FP8 weights float16, 22 bits; for float weights
//           tf32, 22 bits. For hi/lo weights x is hi/lo, too (lib/hi_lo.cuh), with one scale for all
//           rows. In an mma the high and the low terms of a row of x are two rows, whose products with w have separate
//           sums. With OPERAND_TERMS 1, x is rounded to one number, the high term
//   step    the values along K of one mma: 8 for float weights, otherwise 16
//   split   a contiguous range of K: `split_units(K)` units of 128 values. The tensor cores add its steps in order.
//           They truncate sums instead of rounding them; this error is far smaller than the rounding of 16-bit weights.
//           Float and hi/lo weights have two terms, too. For these weights the tensor cores add only one chunk of K,
//           starting from 0, with separate sums for the high and low terms of w; float additions then add both sums to
//           the split's sum. The result of a split is its sum for high terms of x plus its sum for low terms of x
//   total   ((split 0 + split 1) + split 2) + ..., with at most 8 splits
//
// GGUF weights (lib/decode/mma_gguf.cuh): for types with 6-bit scales and minimums (Q4_K, Q5_K), the tensor cores add
// the values of a 256-value GGUF block that lie in the split (codes times 6-bit scales); for other types they add the
// codes of one sub-block. Each of these sums starts from 0, is multiplied by its remaining scale and is then added to
// the split's sum outside of the tensor cores. The minimums of a 256-value block are added before its codes; in other
// types, the minimums of a unit are added after the unit's codes. The sums for high and low terms of x stay separate.
// The total is the sum of splits 0 to 3 plus the sum of the other splits. Two thread blocks can therefore compute one
// of these two sums each.
//
// FP8 weights are converted to float16, which represents all FP8 numbers exactly. Infinity in x makes the sum NaN, or
// with one term infinity or NaN. Zero padding after the end of K does not change a sum.
//
// Either w or x can be operand A of an mma, with 16 rows; the other matrix is operand B, with 8 columns. As A, a tile
// has 16 columns of w, or 8 columns with two terms each; or it has 8 rows of x with two terms each. As B, a tile has 8
// columns of w; or 4 rows of x with two terms each; or, for GGUF weights and one term, 8 rows of x. Neither this choice
// nor the position of an output in its tile changes the output's bits. Lane 4 g + t (t = 0..3) holds the values at
// position t of rows g and g + 8 of A and of column g of B, and the sums
//
//   c[0], c[1] = row g, columns 2t, 2t + 1        c[2], c[3] = row g + 8
//
// A chunk is 64 bytes along K of a column of w (with hi/lo weights, 64 bytes of the high parts and 64 bytes of the
// low parts). Lane 4 g + t loads 16 of these bytes, at offset 16 t, and x at the same positions along K. The lane's
// values of a step are neighbours in these 16 bytes: an mma may take values along K in any order, provided that A and B
// use the same order. Therefore neither operand needs ldmatrix. GGUF blocks are packed in the order of an mma, and x is
// stored in the matching order.
//
// The including file selects T and W (lib/storage.cuh) and includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"
#include "lib/operands.cuh"
#include "lib/hi_lo.cuh"

#ifndef DECODE_ROPE  // channels of a head, if a product fuses RoPE; 0: no RoPE
#define DECODE_ROPE 0
#endif
#ifndef DECODE_CLUSTER  // blocks of a cluster that divide K; in mma.cu the blocks that compute one head
#define DECODE_CLUSTER 1
#endif
#ifndef DECODE_OPERAND  // 1: x is an operand of 16-bit terms (lib/operands.cuh), not floats
#define DECODE_OPERAND 0
#endif
#ifndef DECODE_OUT_OPERAND  // 1: out is stored as an operand, for the next product
#define DECODE_OUT_OPERAND 0
#endif

namespace order {

constexpr bool FLOATS = sizeof(W) == 4;
#if defined(STORAGE_BF16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
constexpr bool BRAIN = HAS_BF16;            // whether the mma multiplies bfloat16
constexpr bool FROM_BRAIN = !HAS_BF16;      // whether it multiplies bfloat16 weights, rounded to float16
#else
constexpr bool BRAIN = false, FROM_BRAIN = false;
#endif
#if defined(WEIGHT_HI_LO)
constexpr bool HI_LO = true;
#else
constexpr bool HI_LO = false;
#endif
constexpr int KIND = HI_LO ? HI_LO_TERMS : BRAIN ? BF16_TERMS : FP16_TERMS;  // format of x's terms (unless tf32)
constexpr int PARTS = HI_LO ? 2 : 1;        // stored numbers per weight
#if defined(WEIGHT_GGUF)
constexpr bool BLOCKS = true;               // whether weights are GGUF blocks (lib/decode/mma_gguf.cuh)
#else
constexpr bool BLOCKS = false;
#endif
constexpr int WIDTH = BLOCKS ? 8 : 16 / sizeof(W);  // values of a column of w that a lane loads per chunk
constexpr int CHUNK = 4 * WIDTH;            // values of K per chunk: 16, 32, or 64 with FP8
constexpr int STEP = FLOATS ? 8 : 16;       // values of K per mma
constexpr int STEPS = CHUNK / STEP;         // mma instructions per chunk
constexpr int TERMS = BLOCKS ? OPERAND_TERMS : 2;   // terms per value of x in an mma; low terms can be 0
static_assert(OPERAND_TERMS == 2 || !(FLOATS || HI_LO), "x is rounded for weights of one term");
constexpr int UNIT = 128, MAX_SPLITS = 8;  // values of K per unit; maximum number of splits (ranges of K)
constexpr int HALF_SPLITS = BLOCKS ? MAX_SPLITS / 2 : MAX_SPLITS;  // splits in a half, which is added up first

__host__ __device__ constexpr int units(int K) { return (K + UNIT - 1) / UNIT; }
__host__ __device__ constexpr int split_units(int K) { return (units(K) + MAX_SPLITS - 1) / MAX_SPLITS; }
__host__ __device__ constexpr int splits(int K) { return (units(K) + split_units(K) - 1) / split_units(K); }
__host__ __device__ constexpr int split_length(int K) { return UNIT * split_units(K); }  // values of K

// Splits a float into two tf32 terms: `high`, the nearest tf32 number, and `low`, the remainder. Tensor cores read only
// the upper 19 bits of a term.
__device__ __forceinline__ void split_tf32(float value, unsigned& high, unsigned& low) {
    high = ((unsigned)__float_as_int(value) + 0x1000u) & 0xffffe000u;
    low = (unsigned)__float_as_int(value - __int_as_float((int)high));
}

// Converts four FP8 bytes, the lowest byte first, to two pairs of float16.
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

// Returns two weights of 16 bits in the type that the mma multiplies.
__device__ __forceinline__ unsigned two_weights(unsigned pair) { return FROM_BRAIN ? bf16_to_fp16(pair) : pair; }

// Returns a sum of products with values that are split into terms. high: the sum of products with the high terms. low:
// the sum of products with the low terms.
__device__ __forceinline__ float joined(float high, float low) {
    if constexpr (OPERAND_TERMS == 1) return high;
    return HI_LO ? fmaf(low, 1.0f / LOW, high) : high + low;
}

// Returns an output: `sum` times the scale of the output's column, plus the bias. With hi/lo weights, the sum is
// also multiplied by the scale of x.
__device__ __forceinline__ float finished(float sum, float scale, float x_scale, float bias) {
    if constexpr (HI_LO) {  // smaller scale first, as in lib/hi_lo.cuh
        sum *= fminf(scale, x_scale), scale = fmaxf(scale, x_scale);
    }
    return fmaf(sum, scale, bias);
}

constexpr int TILE_GROUPS = FLOATS || HI_LO ? 1 : 2;  // groups of 8 columns in a tile whose operand A is w
constexpr int TILE_VECTORS = FLOATS ? 1 : 2;             // 16-byte vectors of w per lane and chunk in this tile

// The values of lane 4 g + t from a chunk of w, as operand A of mma instructions: rows g and g + 8 of A are two columns
// of w, or the high and low terms of column g.
struct Columns {
    unsigned value[STEPS][4];

    Columns() = default;

    // Converts the two 16-byte vectors that lane 4 g + t has loaded: of columns g and g + 8, or of the high and low
    // parts of column g. With float weights, only `first` (column g) is used.
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
                    value[s][half] = two_weights(words[half][2 * s]);
                    value[s][half + 2] = two_weights(words[half][2 * s + 1]);
                }
            }
        }
    }
};

constexpr int TILE_ROWS = 8 / TERMS;  // rows of x in a tile whose operand B is x

// The values of lane 4 g + t from a chunk of TILE_ROWS rows of x, as operand B. With two terms, a lane holds terms of
// row g / 2: high terms if g is even, low terms if g is odd. With one term, a lane holds row g.
struct Rows {
    unsigned value[STEPS][2];

    // Loads the lane's terms of WIDTH values of a chunk. high: address of the high 16-bit terms, aligned to 16 bytes;
    // the low terms are `distance` bytes after the high terms.
    __device__ __forceinline__ void load(const char* high, int distance) {
        const uint4* from = reinterpret_cast<const uint4*>(high + threadIdx.x / 4 % TERMS * distance);
#pragma unroll
        for (int s = 0; s < STEPS; s += 2) {  // one 16-byte load covers two steps
            const uint4 v = from[s / 2];
            value[s][0] = v.x, value[s][1] = v.y, value[s + 1][0] = v.z, value[s + 1][1] = v.w;
        }
    }

    // Loads the lane's four floats of a chunk, aligned to 16 bytes, and splits them into tf32 terms.
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

// Adds the products of a chunk to the sums c, by one mma per step.
__device__ __forceinline__ void multiply(float (&c)[4], const Columns& w, const Rows& x) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if constexpr (FLOATS) mma_tf32(c, w.value[s], x.value[s]);
        else if constexpr (BRAIN) mma_bf16(c, w.value[s], x.value[s]);
        else mma_fp16(c, w.value[s], x.value[s]);
    }
}

// Adds the products of a chunk to the sums of its split (range of K), in a tile whose operand B is x: lane 4 g + t has
// the sums for both terms of row t of x and for columns g and g + 8 of w.
__device__ __forceinline__ void add_chunk(float (&sum)[4], const Columns& w, const Rows& x) { multiply(sum, w, x); }

// Adds the products of a chunk to the sums of its split (range of K), for weights with two terms: lane 4 g + t has the
// sums for both terms of row t of x and for column g of w.
__device__ __forceinline__ void add_chunk(float (&sum)[2], const Columns& w, const Rows& x) {
    float part[4] = {};
    multiply(part, w, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += joined(part[i], part[2 + i]);
}

}  // namespace order
