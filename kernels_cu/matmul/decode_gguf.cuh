// Weights in blocks of GGUF for matmul/decode_mma.cu: up to three ranges of outputs, each of a type.
//
//   lib/gguf.cuh             the blocks
//   matmul/decode_order.cuh  the order of the additions
//
// A tile of an mma has two octets of columns, as for 16-bit weights. Sub-blocks do not share sums, so a chunk of 32 of K
// costs a lane, besides its two mmas, the codes of 16 weights (18 instructions for 4 bits), and for each tile of x rows
// four multiplications with scales and four with minimums. Scales are unpacked once a unit, those of a chunk by one of
// the four lanes that have a row.
#pragma once
#include "lib/gguf.cuh"
#include "matmul/decode_mma.cuh"

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

template <int RANGE>
struct Blocks {
    static constexpr int TYPE = RANGE == 0 ? GGUF_TYPE_0 : RANGE == 1 ? GGUF_TYPE_1 : GGUF_TYPE_2;
    static constexpr int FROM = RANGE == 0 ? 0 : RANGE == 1 ? GGUF_FROM_1 : GGUF_FROM_2;
    typedef gguf::Part<TYPE> Part;
    static_assert(LM_BLOCK_SUMS || !Part::MINIMUM, "sums of x are needed");

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
    template <typename Sums>
    __device__ __forceinline__ void use(int slot, int unit, const Input& input, Sums& sums) const {
        float2 own[2 * TILES] = {};
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) own[octet] = parts[slot][octet].scales(unit);
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Rows x[ROW_TILES];
            float2 sum[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                if (Part::HALVES) input.get_halves(x[r], r, unit, chunk);
                else input.get(x[r], r, unit, chunk);
                const int row = (order::TILE_ROWS * r + threadIdx.x % 4) % LM_ROWS;
                if (Part::MINIMUM) sum[r] = *input.chunk_sum(row, unit * UNIT_CHUNKS + chunk);
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                order::Columns columns;
                float by[2][2];  // of columns g and g + 8: what own has
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int octet = 2 * tile + i;
                    unsigned pairs[4] = {};
                    if (octet < OCTETS) parts[slot][octet < OCTETS ? octet : 0].codes(chunk, pairs);
                    columns.value[0][i] = pairs[0], columns.value[0][i + 2] = pairs[1];
                    columns.value[1][i] = pairs[2], columns.value[1][i + 2] = pairs[3];
                    by[i][0] = gguf::of_lane(own[octet].x, chunk);
                    if (Part::HALVES || Part::MINIMUM) by[i][1] = gguf::of_lane(own[octet].y, chunk);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    float (&to)[4] = sums.of[tile][r];
                    float part[2][4] = {};
                    mma_fp16(part[0], columns.value[0], x[r].value[0]);
                    mma_fp16(part[Part::HALVES], columns.value[1], x[r].value[1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        to[i] = fmaf(by[i / 2][0], part[0][i], to[i]);
                        if (Part::HALVES) to[i] = fmaf(by[i / 2][1], part[1][i], to[i]);
                        if (Part::MINIMUM) to[i] = fmaf(by[i / 2][1], i % 2 ? sum[r].y : sum[r].x, to[i]);
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
