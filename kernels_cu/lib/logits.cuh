// Helpers for the kernels that read whole rows of logits.
//
// Online: the maximum of a row and the sum of exp(x - max), computed in one pass over the row. Threads compute both for
// a part of the row each; the parts are then combined. Best: the largest logit and its token.
//
// Neighbouring threads read neighbouring floats, with several loads per thread in flight. 16-byte loads are not used:
// the vocabulary size can be odd, so the values that a thread adds would depend on the alignment of the row's address.
// The bits of a result would then depend on the row's position in the batch.
#pragma once
#include "lib/common.cuh"

// Returns the value to subtract before exp: `max`, or 0 for -inf, because exp(-inf - 0) is 0, but exp(-inf + inf) is
// NaN.
__device__ __forceinline__ float reference_point(float max) { return max == -INFINITY ? 0.0f : max; }

// The maximum of a row and the sum of exp(x - max). `sum` becomes NaN if any value is NaN (even if all other values are
// -inf) or if the maximum is +inf.
struct Online {
    float max, sum;

    template <int COUNT>
    __device__ __forceinline__ void take(const float (&x)[COUNT]) {
        float larger = max;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) larger = fmaxf(larger, x[i]);
        const float point = reference_point(larger);
        float total = sum * __expf(max - point);  // rescale the sum by one __expf for all COUNT values
#pragma unroll
        for (int i = 0; i < COUNT; ++i) total += __expf(x[i] - point);
        max = larger;
        sum = total;
    }

    __device__ __forceinline__ Online of_warp() const {  // combines the lanes of a warp
        const float all = lanes_max<32>(max);
        return {all, lanes_sum<32>(sum * __expf(max - reference_point(all)))};
    }
};

struct Best {
    float l;
    int id;  // lowest token id with the logit l

    __device__ __forceinline__ bool before(const Best& other) const {
        return l > other.l || (l == other.l && id < other.id);
    }

    __device__ __forceinline__ void add(const Best& other) {
        const bool better = other.before(*this);
        *this = {better ? other.l : l, better ? other.id : id};
    }

    __device__ __forceinline__ Best of_warp() const {  // combines the lanes of a warp
        Best all = *this;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, all.l, distance);
            all.add({other, __shfl_xor_sync(0xffffffffu, all.id, distance)});
        }
        return all;
    }
};

// Loads x[0], x[step], ..., x[(COUNT - 1) * step] into v. Elements from x[left] on do not exist: v receives `other`
// instead. Uses plain loads, so that a row may stay in the L1 cache.
template <int COUNT, typename E>
__device__ __forceinline__ void load_columns(const E* x, int left, int step, E other, E (&v)[COUNT]) {
    if ((COUNT - 1) * step < left) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) v[i] = x[i * step];
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) v[i] = i * step < left ? x[i * step] : other;
    }
}
