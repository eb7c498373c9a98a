// Combination of the splits (ranges of keys) of attention/decode/split.cu, one span of splits after the other.
#pragma once
#include "lib/common.cuh"

// The sums over all spans so far, for 32 channels of a head, one channel per lane. All lanes hold the same m and l.
struct Whole {
    float m, l, o;

    // Adds the first `count` splits of a span. `later`: whether an earlier span has been added.
    template <int CHANNELS, typename Shared>
    __device__ __forceinline__ void add(const Shared& shared, int slot, int channel, int count, bool later) {
        const int lane = threadIdx.x % 32;
        const float own = lane < count ? shared.m[slot][lane] : -INFINITY;
        const float max = lanes_max<32>(own), point = max == -INFINITY ? 0.0f : max;
        const float weight = exp2f(own - point);
        const float total = lanes_sum<32>(lane < count ? __fmul_rn(weight, shared.l[slot][lane]) : 0.0f);
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < count; ++s) {
            sum = fmaf(__shfl_sync(0xffffffffu, weight, s), shared.parts[slot][s][min(channel, CHANNELS - 1)], sum);
        }
        if (later) {
            const float both = fmaxf(m, max), from = both == -INFINITY ? 0.0f : both;
            const float before = exp2f(m - from), now = exp2f(max - from);
            m = both;
            l = fmaf(now, total, before * l);
            o = fmaf(now, sum, before * o);
        } else {
            m = max, l = total, o = sum;
        }
    }
};
