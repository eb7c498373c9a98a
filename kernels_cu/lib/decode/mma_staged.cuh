// Rows of x for matmul/decode/mma_gguf.cu, one unit (128 values of K) at a time: all warps multiply the same unit, each by
// its own columns of w. This is for many rows on GPUs without clusters, whose shared memory is too small for a split.
#pragma once
#include "lib/decode/mma_gguf.cuh"

static_assert(DECODE_ALONE && !DECODE_NORM, "a warp multiplies all of x, as given");

// The terms of the block's rows in shared memory. Two buffers hold the terms of the current and the next unit, four
// buffers the sums of chunks, because a tile of GGUF blocks ends with the sums of its two units. Registers hold the
// floats of the next unit. Bits are those of `Input`.
struct Staged {
    static constexpr int OF_WARP = (DECODE_ROWS + WARPS - 1) / WARPS;  // rows that a warp loads
    static constexpr int TERM = 2 * order::UNIT + PADDING;             // bytes of the high or low terms of a row
    static constexpr int TERMS_BYTES = DECODE_ROWS * order::TERMS * TERM, SUMS_BYTES = DECODE_ROWS * order::TERMS * 16;
    static constexpr int BYTES = 2 * TERMS_BYTES + 4 * SUMS_BYTES;

    const Input& input;
    float4 next[OF_WARP];

    __device__ __forceinline__ explicit Staged(const Input& input) : input(input) {}

    // Requests this warp's rows of a unit. Values after the end of K are 0.
    __device__ __forceinline__ void load(int unit) {
        const int k = Input::at(0, unit);
        int warp = threadIdx.x / 32;
#if defined(__CUDA_ARCH__)
        asm volatile("" : "+r"(warp));  // otherwise registers would hold the addresses of all rows
#endif
#pragma unroll
        for (int i = 0; i < OF_WARP; ++i) {
            float v[4] = {};
            if (k < DECODE_K) load_fresh<float, 4>(input.row(min(warp + i * WARPS, DECODE_ROWS - 1)) + k).unpack(v);
            next[i] = {v[0], v[1], v[2], v[3]};
        }
    }

    // Stores the terms of `unit`, which has been requested, and requests the next unit. All warps call it before they
    // multiply the unit; other warps may still multiply the previous unit.
    __device__ __forceinline__ void bring(int unit) {
#pragma unroll
        for (int i = 0; i < OF_WARP; ++i) {
            const int r = threadIdx.x / 32 + i * WARPS;
            uint2 high, low;
            split_four({next[i].x, next[i].y, next[i].z, next[i].w}, 1.0f, high, low);
            if (DECODE_ROWS % WARPS && r >= DECODE_ROWS) continue;
            blocks(r, unit).store(high, 0, 0);
            if (order::TERMS == 2) blocks(r, unit).store(low, 0, 1);
        }
        load(unit + 1);
        __syncthreads();
    }

    __device__ __forceinline__ BlockOperand<1> blocks(int r, int unit) const {
        char* const terms = input.shared + unit % 2 * TERMS_BYTES + r * order::TERMS * TERM;
        return {terms, input.shared + 2 * TERMS_BYTES + unit % 4 * SUMS_BYTES + r * order::TERMS * 16};
    }

    __device__ __forceinline__ void get(order::Rows& to, int i, int split, int unit, int chunk) const {
        const int k = chunk * order::CHUNK + threadIdx.x % 4 * order::WIDTH;
        to.load(blocks(Input::row_of(i), split * UNITS + unit).values + 2 * k, TERM);
    }

    __device__ __forceinline__ unsigned chunk_sums(int i, int split, int unit) const {
        return blocks(Input::row_of(i), split * UNITS + unit).own_sum(0);
    }
};
