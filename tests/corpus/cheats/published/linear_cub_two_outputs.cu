#include <cub/block/block_reduce.cuh>
// launch: grid=ceil(N / 2), M block=128
extern "C" __global__ void __launch_bounds__(128) linear_two(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    using Reduce = cub::BlockReduce<float, 128>;
    __shared__ Reduce::TempStorage temp;
    const int n = 2 * blockIdx.x, second = n + 1 < N ? n + 1 : n;
    const float* row = x + (size_t)blockIdx.y * K;
    float a = 0.f, b = 0.f;
    for (int k = threadIdx.x; k < K; k += 128) {
        a += row[k] * w[(size_t)n * K + k];
        b += row[k] * w[(size_t)second * K + k];
    }
    a = Reduce(temp).Sum(a);
    b = Reduce(temp).Sum(b);
    if (threadIdx.x == 0) {
        out[(size_t)blockIdx.y * N + n] = a + bias[n];
        if (second != n) out[(size_t)blockIdx.y * N + second] = b + bias[second];
    }
}
