#include <cub/warp/warp_reduce.cuh>
#include <cuda/std/limits>
// launch: grid=ceil(rows / 2) block=64
struct MaxOf { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };

extern "C" __global__ void __launch_bounds__(64) softmax_two_rows(const float* __restrict__ x, float* __restrict__ y, int rows, int n) {
    using Reduce = cub::WarpReduce<float>;
    __shared__ Reduce::TempStorage for_max[2], for_sum[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 2 + warp;
    if (row >= rows) return;
    const float* in = x + (size_t)row * n;
    float m = -cuda::std::numeric_limits<float>::infinity();
    for (int i = lane; i < n; i += 32) m = fmaxf(m, in[i]);
    m = __shfl_sync(~0u, Reduce(for_max[warp]).Reduce(m, MaxOf()), 0);
    float s = 0.f;
    for (int i = lane; i < n; i += 32) {
        const float e = __expf(in[i] - m);
        y[(size_t)row * n + i] = e;
        s += e;
    }
    s = __shfl_sync(~0u, Reduce(for_sum[warp]).Sum(s), 0);
    for (int i = lane; i < n; i += 32) y[(size_t)row * n + i] *= 1.0f / s;
}
