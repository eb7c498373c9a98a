#include <cub/warp/warp_reduce.cuh>
#include "lib/storage.cuh"
// launch: grid=ceil(N / 4), M block=128
extern "C" __global__ void __launch_bounds__(128) gated_ffn(const T* x, const T* gamma, const T* w1, const T* w3, T* out,
                                                           float eps, int N, int K) {
    using WarpSum = cub::WarpReduce<float>;
    __shared__ WarpSum::TempStorage temp[4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n = blockIdx.x * 4 + warp;
    const T* row = x + (size_t)blockIdx.y * K;
    if (n >= N) return;

    float ss = 0.f;
    for (int k = lane; k < K; k += 32) ss += widen(row[k]) * widen(row[k]);
    ss = WarpSum(temp[warp]).Sum(ss);
    const float scale = rsqrtf(__shfl_sync(0xffffffff, ss, 0) / K + eps);

    float gate = 0.f, up = 0.f;
    for (int k = lane; k < K; k += 32) {
        const float v = widen(row[k]) * scale * widen(gamma[k]);
        gate += v * widen(w1[(size_t)n * K + k]);
        up += v * widen(w3[(size_t)n * K + k]);
    }
    __syncwarp();
    gate = WarpSum(temp[warp]).Sum(gate);
    __syncwarp();
    up = WarpSum(temp[warp]).Sum(up);
    if (lane == 0) out[(size_t)blockIdx.y * N + n] = narrow(gate / (1.f + __expf(-gate)) * up);
}
