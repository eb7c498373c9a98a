// Floats as the sum of two 16-bit numbers, their terms, for products on tensor cores: each is the nearest one to what
// is left. Two of bfloat16 have 16 bits and the range of a float; two of float16 have 22 bits, down to 2^-24, and
// magnitudes up to 65504. Infinity gives NaN.
//
// In memory the terms of a pair of neighbouring values take the place of their floats, the high ones first.
//
// The including file includes lib/sm80.cuh.
#pragma once

// The terms of two values, the first one in the lower half. BRAIN: of bfloat16.
template <bool BRAIN>
__device__ __forceinline__ void split_pair(float first, float second, unsigned& high, unsigned& low) {
    float rounded[2];
    high = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
    if (BRAIN) unpack2_bf16(high, rounded);
    else unpack2_fp16(high, rounded);
    first -= rounded[0], second -= rounded[1];
    low = BRAIN ? pack2_bf16(first, second) : pack2_fp16(first, second);
}

// What the place of a lane's value then holds. Lanes 2i and 2i + 1 have a pair; all lanes of a warp call this.
template <bool BRAIN>
__device__ __forceinline__ float term_of(float value) {
    const bool odd = threadIdx.x % 2;
    const float other = __shfl_xor_sync(0xffffffffu, value, 1);
    unsigned high, low;
    split_pair<BRAIN>(odd ? other : value, odd ? value : other, high, low);
    return __int_as_float((int)(odd ? low : high));
}
