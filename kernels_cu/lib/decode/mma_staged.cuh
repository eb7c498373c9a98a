// Rows of x for matmul/decode/mma_gguf.cu, one unit (128 values of K) at a time: all warps multiply the same unit, each
// by its own columns of w. This is for many rows on GPUs without clusters, whose shared memory is too small for a
// split.
#pragma once
#include "lib/decode/mma_gguf.cuh"

static_assert(DECODE_ALONE && !DECODE_NORM, "a warp multiplies all of x, as given");

// The terms of the block's rows in shared memory. Two buffers hold the terms of the current and the next unit, four
// buffers the sums of chunks, because a tile of GGUF blocks ends with the sums of its two units. Registers hold the
// floats of the next unit. Bits are those of `Input`.
struct Staged {
    static constexpr int OF_WARP = DECODE_ROWS / WARPS, SCATTERED = OF_WARP < 8 ? OF_WARP : 8;  // rows of a warp
    static constexpr int TERM = 2 * order::UNIT + PADDING;  // bytes of the high or low terms of a row
    static constexpr int TERMS_BYTES = DECODE_ROWS * order::TERMS * TERM, SUMS_BYTES = DECODE_ROWS * order::TERMS * 16;
    static constexpr int BYTES = 2 * TERMS_BYTES + 4 * SUMS_BYTES;
    static_assert(OF_WARP * WARPS == DECODE_ROWS && (OF_WARP & (OF_WARP - 1)) == 0, "warps load equally many rows");

    const Input& input;
    float4 next[OF_WARP];

    __device__ __forceinline__ explicit Staged(const Input& input) : input(input) {}

    // Requests this warp's rows of a unit. Rows after the last one, and values after the end of K, are 0.
    __device__ __forceinline__ void load(int unit) {
        const int k = Input::at(0, unit), row = input.first + threadIdx.x / 32;
        const float* const from = input.x + (long long)row * DECODE_K + k;
#pragma unroll
        for (int i = 0; i < OF_WARP; ++i) {
            float v[4] = {};
            if (k < DECODE_K && row + i * WARPS < input.M) load_fresh<float, 4>(from + i * WARPS * DECODE_K).unpack(v);
            next[i] = {v[0], v[1], v[2], v[3]};
        }
    }

    // Requests unit `first` and stores it.
    __device__ __forceinline__ void begin(int first, int) {
        load(first);
        store(first);
    }

    // Calls multiply() for `unit`, and stores the next unit.
    template <typename Multiply>
    __device__ __forceinline__ void use(int unit, Multiply multiply) {
        __syncthreads();
        // Half of the warps multiply while the others store: two warps of a scheduler are apart.
        const bool early = threadIdx.x < THREADS / 2;
        if (early) store(unit + 1);
        multiply();
        if (!early) store(unit + 1);
    }

    // Stores the terms of `unit`, which has been requested, and requests the next unit. Warps call it before or after
    // they multiply the previous unit.
    __device__ __forceinline__ void store(int unit) {
        uint2 terms[2][OF_WARP];
#pragma unroll
        for (int i = 0; i < OF_WARP; ++i) {
            split_four({next[i].x, next[i].y, next[i].z, next[i].w}, 1.0f, terms[0][i], terms[1][i]);
        }
#pragma unroll
        for (int term = 0; term < order::TERMS; ++term) {
#pragma unroll
            for (int i = 0; i < OF_WARP; ++i) blocks(threadIdx.x / 32 + i * WARPS, unit).put(terms[term][i], 0, term);
#pragma unroll
            for (int i = 0; i < OF_WARP; i += SCATTERED) store_sums(terms[term] + i, i, unit, term);
        }
        load(unit + 1);
    }

    // Stores the sums of chunks of SCATTERED rows, the warp's rows from `first` on. Eight lanes hold a chunk of each
    // row. They add in the order of lanes_sum<8>, but each of them completes the sum of one row.
    __device__ __forceinline__ void store_sums(const uint2* terms, int first, int unit, int term) const {
        const int lane = threadIdx.x % 32;
        float sums[SCATTERED];
#pragma unroll
        for (int i = 0; i < SCATTERED; ++i) sums[i] = sum_of(terms[i].x) + sum_of(terms[i].y);
#pragma unroll
        for (int distance = 4, left = SCATTERED; distance > 0; distance /= 2, left = (left + 1) / 2) {
#pragma unroll
            for (int i = 0; i < (left + 1) / 2; ++i) {
                const bool second = left > 1 && lane & distance;
                const float given = left > 1 && !second ? sums[i + left / 2] : sums[i];
                const float kept = second ? sums[i + left / 2] : sums[i];
                sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
            }
        }
        const int row = threadIdx.x / 32 + (first + lane % 8 * SCATTERED / 8) * WARPS;
        if (lane * SCATTERED % 8 == 0) *blocks(row, unit).chunk_sum(0, term, lane / 8) = split_sum(sums[0]);
    }

    // Returns the places of row r's terms and chunk sums in unit `unit` (128 values of K).
    __device__ __forceinline__ BlockOperand<1> blocks(int r, int unit) const {
        char* const terms = input.shared + unit % 2 * TERMS_BYTES + r * order::TERMS * TERM;
        return {terms, input.shared + 2 * TERMS_BYTES + unit % 4 * SUMS_BYTES + r * order::TERMS * 16};
    }

    // Loads the lane's values of a chunk for the rows of tile i (order::TILE_ROWS rows).
    __device__ __forceinline__ void get(order::Rows& to, int i, int split, int unit, int chunk) const {
        const int k = chunk * order::CHUNK + threadIdx.x % 4 * order::WIDTH;
        to.load(blocks(Input::row_of(i), split * UNITS + unit).values + 2 * k, TERM);
    }

    // Returns the sum over chunk t of a unit, for the row and term that lane 4 g + t holds in tile i.
    __device__ __forceinline__ unsigned chunk_sums(int i, int split, int unit) const {
        return blocks(Input::row_of(i), split * UNITS + unit).own_sum(0);
    }
};
