#include <cub/block/block_reduce.cuh>
// launch: grid=N block=128
template <int THREADS>
__device__ float reduce_block(float v) {
    using Reduce = cub::BlockReduce<float, THREADS>;
    __shared__ typename Reduce::TempStorage temp;
    __syncthreads();
    return Reduce(temp).Sum(v);
}

extern "C" __global__ void __launch_bounds__(128) layernorm_block(const float* x, const float* gamma, const float* beta,
                                                                 float* out, float eps, int C) {
    const float* row = x + (size_t)blockIdx.x * C;
    float sum = 0.f, squares = 0.f;
    for (int c = threadIdx.x; c < C; c += 128) sum += row[c];
    const float mean = reduce_block<128>(sum) / C;
    for (int c = threadIdx.x; c < C; c += 128) squares += (row[c] - mean) * (row[c] - mean);
    const float rstd = rsqrtf(reduce_block<128>(squares) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128)
        out[(size_t)blockIdx.x * C + c] = (row[c] - mean) * rstd * gamma[c] + beta[c];
}
