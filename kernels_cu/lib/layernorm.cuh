// LayerNorm of a row by one warp, with the same bits in every kernel of decoding: first the mean, then the variance
// around the mean. For both sums, a lane first adds value e of all its loads, for each e = 0..X-1; then the X sums of
// the lane are added, then the sums of the lanes.
//
// A load has X = gcd(4, K) values. Load i = 0, 1, ... of lane l covers the X values of the row from index (32 i + l) X
// on.
#pragma once
#include "lib/common.cuh"

// Calls use(i, k) for each load i of this lane. `k`: position in the row of the load's first value.
template <int K, int X, typename Use>
__device__ __forceinline__ void each_of_lane(Use use) {
#pragma unroll 6
    for (int i = 0; i < (K + 32 * X - 1) / (32 * X); ++i) {
        const int k = (i * 32 + threadIdx.x % 32) * X;
        if (K % (32 * X) && k >= K) break;
        use(i, k);
    }
}

template <int K, int X>
struct Statistics {  // mean and rstd of a row, with the same bits in every lane
    float mean, rstd;

    __device__ __forceinline__ Statistics(float mean, float rstd) : mean(mean), rstd(rstd) {}

    // Computes the statistics of a row. read(i, k, v) must store the X values of load i, which begin at position k of
    // the row, in v. It is called twice for each load.
    template <typename Read>
    __device__ __forceinline__ Statistics(float eps, Read read) {
        const auto average = [&](float around, bool squares) {
            float sum[X] = {};
            each_of_lane<K, X>([&](int i, int k) {
                float v[X];
                read(i, k, v);
#pragma unroll
                for (int e = 0; e < X; ++e) sum[e] += squares ? (v[e] - around) * (v[e] - around) : v[e];
            });
#pragma unroll
            for (int e = 1; e < X; ++e) sum[0] += sum[e];
            return lanes_sum<32>(sum[0]) / K;
        };
        mean = average(0.0f, false);
        rstd = rsqrtf(average(mean, true) + eps);
    }

    __device__ __forceinline__ float of(float x, float gamma, float beta) const {
        return fmaf((x - mean) * rstd, gamma, beta);
    }
};
