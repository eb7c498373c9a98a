// Weights in blocks of GGUF for matmul/decode_mma.cu: up to three ranges of outputs, each of a type.
//
//   lib/gguf.cuh             the blocks
//   matmul/decode_order.cuh  the order of the additions
//
// A tile of an mma has two octets of columns, as for 16-bit weights. Sub-blocks do not share sums, so a chunk of 32 of K
// costs a lane, besides its two mmas, the codes of 16 weights (18 instructions for 4 bits), and for each tile of x rows
// four multiplications with scales and four with minimums. Scales are unpacked once a unit, those of a chunk by one of
// the four lanes that have a row. The sums of x in a chunk are products with ones, in the order of all other ones.
#pragma once
#include "lib/gguf.cuh"
#include "matmul/decode_totals.cuh"

#ifndef GGUF_TYPE_0
#define GGUF_TYPE_0 6
#endif
#ifndef GGUF_RANGES
#define GGUF_RANGES 1
#endif
#ifndef GGUF_TYPE_1  // of the outputs from GGUF_FROM_1 on
#define GGUF_TYPE_1 GGUF_TYPE_0
#endif
#ifndef GGUF_FROM_1
#define GGUF_FROM_1 0
#endif
#ifndef GGUF_TYPE_2  // of the outputs from GGUF_FROM_2 on
#define GGUF_TYPE_2 GGUF_TYPE_0
#endif
#ifndef GGUF_FROM_2
#define GGUF_FROM_2 0
#endif

// The row of sum i of a lane, 0 or 1, of tile r of rows.
__device__ __forceinline__ int lane_row(int r, int i) {
    return order::TILE_ROWS * r + threadIdx.x % 4 * LANE_ROWS + i % LANE_ROWS;
}

// The sums of a chunk of a tile of rows of x, as a lane has those of their products.
__device__ __forceinline__ void sum_chunk(float (&sum)[2], const order::Rows& x) {
    const unsigned ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float c[4] = {};
    mma_fp16(c, ones, x.value[0]);
    mma_fp16(c, ones, x.value[1]);
    sum[0] = c[0], sum[1] = c[1];
}

template <int RANGE>
struct Blocks {
    static constexpr int TYPE = RANGE == 0 ? GGUF_TYPE_0 : RANGE == 1 ? GGUF_TYPE_1 : GGUF_TYPE_2;
    static constexpr int FROM = RANGE == 0 ? 0 : RANGE == 1 ? GGUF_FROM_1 : GGUF_FROM_2;
    typedef gguf::Part<TYPE> Part;

    Part parts[LM_FLIGHT][OCTETS];
    const W* w;  // of the range
    const int N;

    __device__ __forceinline__ Blocks(const W* all, int N) : w(all + begin()), N(N) {}

    __device__ __forceinline__ void fetch(int slot, int unit, int n) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            Part& part = parts[slot][octet];
            part.clear();
            if (8 * octet + 7 >= LM_COLUMNS && 8 * octet + g >= LM_COLUMNS) continue;
            if (SPLITS * LENGTH > LM_K && unit * order::UNIT >= LM_K) continue;
            part.load(w, LM_K, Column(n + 8 * octet + g, N).n - FROM, unit);
        }
    }

    // Adds a unit to the sums of its split.
    __device__ __forceinline__ void use(int slot, int unit, const Input& input, Sums& sums) const {
        float2 own[2 * TILES] = {};
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) own[octet] = parts[slot][octet].scales(unit);
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Columns columns[TILES];
            float by[TILES][2][2];  // of columns g and g + 8 of a tile: what own has
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                unsigned pairs[4] = {};
                if (i < OCTETS) parts[slot][i < OCTETS ? i : 0].codes(chunk, pairs);
                unsigned(&to)[2][4] = columns[i / 2].value;
                to[0][i % 2] = pairs[0], to[0][i % 2 + 2] = pairs[1];
                to[1][i % 2] = pairs[2], to[1][i % 2 + 2] = pairs[3];
                by[i / 2][i % 2][0] = gguf::of_lane(own[i].x, chunk);
                if (Part::HALVES || Part::MINIMUM) by[i / 2][i % 2][1] = gguf::of_lane(own[i].y, chunk);
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                if (LM_ALONE && r % 2 == 0) __syncwarp();  // else all tiles wait in registers
                order::Rows x;
                if (Part::HALVES) input.get_halves(x, r, unit, chunk);
                else input.get(x, r, unit, chunk);
                float sum[2];  // of x, for sums 0 and 1 of a lane
                if (Part::MINIMUM && !LM_ALONE) sum_chunk(sum, x);
#pragma unroll
                for (int i = 0; i < 2 && Part::MINIMUM && LM_ALONE; ++i) {
                    const int in_split = unit % UNITS * UNIT_CHUNKS + chunk;
                    sum[i] = input.chunk_sum(lane_row(r, i) % LM_ROWS, in_split)[i % order::TERMS];
                }
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    float (&to)[4] = sums.of[tile][r];
                    float part[2][4] = {};
                    mma_fp16(part[0], columns[tile].value[0], x.value[0]);
                    mma_fp16(part[Part::HALVES], columns[tile].value[1], x.value[1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        to[i] = fmaf(by[tile][i / 2][0], part[0][i], to[i]);
                        if (Part::HALVES) to[i] = fmaf(by[tile][i / 2][1], part[1][i], to[i]);
                        if (Part::MINIMUM) to[i] = fmaf(by[tile][i / 2][1], sum[i % 2], to[i]);
                    }
                }
            }
        }
    }

   private:
    // Bytes before the range.
    __device__ __forceinline__ static long long begin() {
        long long bytes = 0;
        constexpr int SECOND = GGUF_RANGES > 2 ? GGUF_FROM_2 - GGUF_FROM_1 : 0;
        if (RANGE > 0) bytes += (long long)((GGUF_FROM_1 + 7) / 8) * gguf::Part<GGUF_TYPE_0>::row_bytes(LM_K);
        if (RANGE > 1) bytes += (long long)((SECOND + 7) / 8) * gguf::Part<GGUF_TYPE_1>::row_bytes(LM_K);
        return bytes;
    }
};
