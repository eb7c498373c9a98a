// What the kernels that read whole rows of logits share.
//
// Online: maximum and sum of exp(x - max), found in one pass over a row and put together from parts.
//
// Neighbouring threads read neighbouring floats, several loads each on their way. Loads of 16 bytes would tie what a
// thread adds up to where a row starts in memory, as the length of a vocabulary is odd: a row would then have other
// bits in a batch than alone.
#pragma once
#include "lib/common.cuh"

// What to take off before exp, where nothing but -inf may have been seen: exp(-inf - 0) is 0, exp(-inf + inf) NaN.
__device__ __forceinline__ float reference_point(float max) { return max == -INFINITY ? 0.0f : max; }

// NaN in `sum` as soon as NaN was seen, also beside -inf alone, and where the maximum is +inf.
struct Online {
    float max, sum;

    template <int COUNT>
    __device__ __forceinline__ void take(const float (&x)[COUNT]) {
        float larger = max;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) larger = fmaxf(larger, x[i]);
        const float point = reference_point(larger);
        float total = sum * __expf(max - point);  // once for all of these
#pragma unroll
        for (int i = 0; i < COUNT; ++i) total += __expf(x[i] - point);
        max = larger;
        sum = total;
    }

    __device__ __forceinline__ Online of_warp() const {  // with the parts of the other lanes
        const float all = lanes_max<32>(max);
        return {all, lanes_sum<32>(sum * __expf(max - reference_point(all)))};
    }
};

// x[0], x[step] ... of the `left` values from x on, and `other` beyond. Plain loads: a row may stay in the L1 cache.
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
