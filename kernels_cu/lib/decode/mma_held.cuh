// Rows of x in registers, for matmul/decode/mma_gguf.cu: each warp multiplies one split (range of K) of x, which has
// one term per value and no norm. This is for GPUs whose shared memory is too small for the rows.
#pragma once
#include "lib/decode/mma_gguf.cuh"

static_assert(GGUF_TOGETHER && order::TERMS == 1 && !DECODE_NORM, "a warp has one split of x, as given");

// A lane's values of one split (range of K) of the block's rows, in registers, as operands B of all mma instructions of
// the split. Bits are those of `Input`.
struct Held {
    unsigned value[ROW_TILES][UNITS][UNIT_CHUNKS][4], sums[ROW_TILES][UNITS];

    // Loads the lane's values of the split, in all chunks of all rows, and computes their chunk sums.
    __device__ __forceinline__ void bring(const Input& input, int split) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * UNITS * UNIT_CHUNKS; ++i) {
            const int r = i / (UNITS * UNIT_CHUNKS), unit = i / UNIT_CHUNKS % UNITS, chunk = i % UNIT_CHUNKS;
            const int k = split * LENGTH + unit * order::UNIT + chunk * order::CHUNK, t = threadIdx.x % 4;
            unsigned (&to)[4] = value[r][unit][chunk];
            float of_fours[4];
            unsigned low;
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                to[p] = 0;
                if (SPLITS * LENGTH == DECODE_K || k < DECODE_K) {
                    float v[2];
                    load_fresh<float, 2>(input.row(Input::row_of(r)) + k + 8 * p + 2 * t).unpack(v);
                    split_pair<order::KIND>(v[0], v[1], 1.0f, to[p], low);
                }
                const float pair = sum_of(to[p]);
                of_fours[p] = pair + __shfl_xor_sync(0xffffffffu, pair, 1);
            }
            float sum = (of_fours[0] + of_fours[2]) + (of_fours[1] + of_fours[3]);  // the order of lanes_sum<8>
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (chunk == t) sums[r][unit] = split_sum(sum);
        }
    }

    // Copies the lane's values of a chunk, for the rows of tile r.
    __device__ __forceinline__ void get(order::Rows& to, int r, int, int unit, int chunk) const {
#pragma unroll
        for (int p = 0; p < 4; ++p) to.value[p / 2][p % 2] = value[r][unit][chunk][p];
    }

    // Returns the sum over chunk t of a unit, for the row that lane 4 g + t holds in tile r.
    __device__ __forceinline__ unsigned chunk_sums(int r, int, int unit) const { return sums[r][unit]; }
};

// The index of a register must not depend on `half`, which the compiler may not know.
__device__ __forceinline__ unsigned earlier_sums(const Held& held, int r, int, int unit, int half) {
    return half ? held.sums[r][unit > 0 ? unit - 1 : 0] : held.sums[r][unit];
}
