// Weights in blocks of GGUF for matmul/decode_mma.cu: up to three ranges of outputs, each of a type.
//
//   lib/gguf.cuh             the blocks
//   matmul/decode_order.cuh  the order of the additions
//
// A tile of an mma has two octets of columns, as for 16-bit weights. Of a chunk of 32 of K a lane unpacks 16 weights,
// in 18 instructions for 4 bits. Of Q4_K and Q5_K it multiplies them by s and adds a unit in the tensor cores, then
// multiplies by d. Of others, sub-blocks have sums of their own, multiplied by their scales. Minimums m are multiplied
// by x in the tensor cores, too, as weights that are all alike. Scales are unpacked once a unit, those of a chunk by
// one of the four lanes that have a row.
//
// NVIDIA H100, 12,288 x 4,096 in Q4_K. Predicted for a row: 45 instructions of a warp for 32 of K of 16 columns, which
// hides behind DRAM at 2 of 4 instructions a cycle. Measured: 48, and 375 in each warp before and after its four units;
// 18.7 us by itself, DRAM at 46 % of its rate, 0.46 instructions a cycle of each scheduler with 3.7 of 16 warps, which
// wait for shared memory and shuffles. 64 rows by matmul/decode_gguf.cu: 76 us, 0.41 instructions a cycle.
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

static_assert(!LM_LOOP || GGUF_RANGES == 1, "warps that loop over columns have those of one type");

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
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) use_tile(parts[slot] + 2 * tile, tile, unit, input, sums);
    }

   private:
    // octets: those of the tile, of which the second one may be missing.
    __device__ __forceinline__ void use_tile(const Part* octets, int tile, int unit, const Input& input,
                                             Sums& sums) const {
        typename Part::Own own[2] = {};
        order::Columns columns[UNIT_CHUNKS];
        unsigned least[UNIT_CHUNKS][4];  // m in all places of a step
        float by[UNIT_CHUNKS][2][2];     // of columns g and g + 8: first and second
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool there = 2 * tile + i < OCTETS;
            if (there) own[i] = octets[i].own(unit);
#pragma unroll
            for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
                unsigned pairs[4] = {}, halves = 0;
                if (Part::MINIMUM) halves = gguf::of_lane(own[i].halves, chunk);
                if (there) octets[i].codes(chunk, halves, pairs);
                unsigned(&to)[2][4] = columns[chunk].value;
                to[0][i] = pairs[0], to[0][i + 2] = pairs[1], to[1][i] = pairs[2], to[1][i + 2] = pairs[3];
                if (Part::MINIMUM) least[chunk][i] = least[chunk][i + 2] = Part::twice(halves, 1);
                if (!Part::INTEGERS) by[chunk][i][0] = gguf::of_lane(own[i].first, chunk);
                if (Part::HALVES) by[chunk][i][1] = gguf::of_lane(own[i].second, chunk);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            if (ROW_TILES > 2) __syncwarp();  // else x of all tiles waits in registers
            float (&to)[4] = sums.of[tile][r];
            float whole[4] = {}, minimum[4] = {};
#pragma unroll
            for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
                order::Rows x;
                if (Part::HALVES) input.get_halves(x, r, unit, chunk);
                else input.get(x, r, unit, chunk);
                float part[2][4] = {};
                float (&first)[4] = Part::INTEGERS ? whole : part[0];
                float (&second)[4] = Part::INTEGERS ? whole : part[Part::HALVES];
                mma_fp16(first, columns[chunk].value[0], x.value[0]);
                mma_fp16(second, columns[chunk].value[1], x.value[1]);
                if (Part::MINIMUM) mma_fp16(minimum, least[chunk], x.value[0]);
                if (Part::MINIMUM) mma_fp16(minimum, least[chunk], x.value[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!Part::INTEGERS) to[i] = fmaf(by[chunk][i / 2][0], part[0][i], to[i]);
                    if (Part::HALVES) to[i] = fmaf(by[chunk][i / 2][1], part[1][i], to[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (Part::INTEGERS) to[i] = fmaf(own[i / 2].d, whole[i], to[i]);
                if (Part::MINIMUM) to[i] = fmaf(own[i / 2].least, minimum[i], to[i]);
            }
        }
    }

    // Bytes before the range.
    __device__ __forceinline__ static long long begin() {
        long long bytes = 0;
        constexpr int SECOND = GGUF_RANGES > 2 ? GGUF_FROM_2 - GGUF_FROM_1 : 0;
        if (RANGE > 0) bytes += (long long)((GGUF_FROM_1 + 7) / 8) * gguf::Part<GGUF_TYPE_0>::row_bytes(LM_K);
        if (RANGE > 1) bytes += (long long)((SECOND + 7) / 8) * gguf::Part<GGUF_TYPE_1>::row_bytes(LM_K);
        return bytes;
    }
};
