// Softmax of scores in the tensor-core attention kernels (attention/prompt/mma*.cu and wgmma*.cu). The including file
// selects T, a 16-bit type (lib/storage.cuh).
//
//   P = exp2(S * UNIT - reference)     S = q . k, not yet divided by sqrt(SIZE); UNIT = log2(e) / sqrt(SIZE)
//
// When the reference of a row is set, it is 8 less than the row's largest S * UNIT. P is rounded to T. The largest P of
// a row is at least 2^8, so values of P are not zero in fp16 if they are at least 2^-32 of the largest P. If a later
// score would make P exceed 2^15, the reference is set again and the output sums are rescaled. This is rare.
//
// A key that a query does not see has P = 0, but 0 times NaN or infinity is NaN. Therefore, if some queries do not see
// all keys of a product, infinite and NaN values are removed from V and added separately to the queries that see them.
#pragma once

#include "lib/attention/unit.cuh"
#include "lib/attention/window.cuh"
#include "lib/common.cuh"

#ifndef ATT_CAUSAL  // 1: a query sees the keys up to its position; 0: all keys of its sequence
#define ATT_CAUSAL 1
#endif
#ifndef ATT_SIZE  // channels of a head: 64, 128 or 256
#define ATT_SIZE 64
#endif
#ifndef ATT_SERVES  // heads of Q that share a head of K and V
#define ATT_SERVES 1
#endif

constexpr int SIZE = ATT_SIZE;
static_assert(SIZE == 64 || SIZE == 128 || SIZE == 256, "a head has 64, 128 or 256 channels");
#ifdef ATT_SCALE
constexpr float UNIT = LOG2_E * ATT_SCALE;
#else
// exp(s / sqrt(SIZE)) = exp2(s * UNIT)
constexpr float UNIT = LOG2_E / (SIZE == 64 ? 8 : SIZE == 128 ? 11.3137085f : 16);
#endif
constexpr float BELOW = 8, AT_MOST = 15;         // log2 of a row's largest P: BELOW at a new reference, then <= AT_MOST

// `pair` holds two values of T. In the result, the sign bit of each half is 1 if the value is infinite or NaN; all
// other bits are 0.
__device__ __forceinline__ unsigned not_finite(unsigned pair) {
#if defined(STORAGE_BF16) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return ((pair & 0x7fff7fffu) + 0x38803880u) & 0x80008000u;  // from 2^16 on, which tensor cores read as infinity
#elif defined(STORAGE_BF16)
    return ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
#else
    return ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
#endif
}

// Returns two values of T, of which infinite and NaN values are replaced by 0.
__device__ __forceinline__ unsigned finite_of(unsigned pair) { return pair & ~((not_finite(pair) >> 15) * 0xffffu); }

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }

// Adds to `out` the infinite and NaN values of V that have been replaced by 0 for keys `from` to `to` - 1, in the rows
// that see these keys. Lane 4 g + t has the sums out[4 n ..] of channels 8 n + 2t and 8 n + 2t + 1, of row g and then
// of row g + 8. values: V of key 0, whose keys are `stride` apart. row: the lane's row g.
template <typename V>
__device__ __forceinline__ void add_not_finite(float* out, const V* values, long long stride, int from, int to,
                                               int row) {
#pragma unroll 1
    for (int key = from; key < to; ++key) {
#pragma unroll
        for (int i = 0; i < SIZE / 4; ++i) {
            const float v = widen(values[key * stride + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2]);
            if (!is_finite(v)) {
                if (!ATT_CAUSAL || (key <= row && !is_past(key, row))) out[i / 2 * 4 + i % 2] += v;
                if (!ATT_CAUSAL || (key <= row + 8 && !is_past(key, row + 8))) out[i / 2 * 4 + 2 + i % 2] += v;
            }
        }
    }
}
