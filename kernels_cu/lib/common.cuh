// Reductions over a block and over lanes.
//
// block_reduce_sum and block_reduce_max use a tree in shared memory, with a barrier after each level; the last levels
// use, and synchronise, only one warp. Every thread of the block receives the result:
//
//   scratch   [a b c d e f g h]
//   stride 4  [a+e b+f c+g d+h ...]
//   stride 2  [a+e+c+g b+f+d+h ...]
//   stride 1  [sum ...]
//
// BLOCK is blockDim.x and must be a power of two: with 96 threads the tree would drop elements, so any other value does
// not compile. The order of the additions is fixed: the same input gives the same bits.
//
// lanes_sum and lanes_max reduce over a group of neighbouring lanes by shuffles. Every lane of the group receives the
// result. All lanes of the warp must call these functions.
#pragma once

#ifndef INFINITY  // NVRTC provides no <math.h>
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace reduction {  // avoids conflicts with names in the including files

struct Sum {
    static __device__ float combine(float a, float b) { return a + b; }
};

struct Max {
    static __device__ float combine(float a, float b) { return fmaxf(a, b); }
};

}  // namespace reduction

template <typename Op, int BLOCK>
__device__ float block_reduce(float value, float* scratch) {  // scratch: BLOCK floats of shared memory
    static_assert(BLOCK > 0 && (BLOCK & (BLOCK - 1)) == 0, "the block size must be a power of two");
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (int stride = BLOCK / 2; stride > 0; stride /= 2) {
        if (threadIdx.x < stride) {
            scratch[threadIdx.x] = Op::combine(scratch[threadIdx.x], scratch[threadIdx.x + stride]);
        }
        if (stride > 32) {
            __syncthreads();
        } else if (threadIdx.x < 32) {  // from this level on, only the first warp is active
            __syncwarp();
        }
    }
    __syncthreads();
    const float result = scratch[0];
    __syncthreads();  // otherwise a second call could overwrite scratch[0] before a slow thread has read it
    return result;
}

template <int BLOCK>
__device__ float block_reduce_sum(float value, float* scratch) {
    return block_reduce<reduction::Sum, BLOCK>(value, scratch);
}

template <int BLOCK>
__device__ float block_reduce_max(float value, float* scratch) {
    return block_reduce<reduction::Max, BLOCK>(value, scratch);
}

// Returns the smallest power of two that is at least n.
__device__ constexpr int next_power(int n) { return n <= 1 ? 1 : 2 * next_power((n + 1) / 2); }

template <typename Op, int LANES>
__device__ __forceinline__ float lanes_reduce(float value) {  // reduces over each group of LANES lanes
    static_assert(LANES > 0 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "a group of lanes is a power of two");
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

template <int LANES>
__device__ __forceinline__ float lanes_sum(float value) {
    return lanes_reduce<reduction::Sum, LANES>(value);
}

template <int LANES>
__device__ __forceinline__ float lanes_max(float value) {
    return lanes_reduce<reduction::Max, LANES>(value);
}
