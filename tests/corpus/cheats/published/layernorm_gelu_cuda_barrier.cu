#include <cuda/barrier>
// launch: grid=N block=128
using Barrier = cuda::barrier<cuda::thread_scope_block>;

__device__ float reduce(float v, float* cells, Barrier& barrier) {
    cells[threadIdx.x] = v;
    barrier.arrive_and_wait();
    for (int half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half) cells[threadIdx.x] += cells[threadIdx.x + half];
        barrier.arrive_and_wait();
    }
    const float total = cells[0];
    barrier.arrive_and_wait();
    return total;
}

extern "C" __global__ void __launch_bounds__(128) norm_gelu(const float* x, float* y, float eps, int C) {
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier barrier;
    __shared__ float cells[128];
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    const float* row = x + (size_t)blockIdx.x * C;
    float s = 0.f, q = 0.f;
    for (int c = threadIdx.x; c < C; c += 128) s += row[c];
    const float mean = reduce(s, cells, barrier) / C;
    for (int c = threadIdx.x; c < C; c += 128) q += (row[c] - mean) * (row[c] - mean);
    const float rstd = rsqrtf(reduce(q, cells, barrier) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) {
        const float v = (row[c] - mean) * rstd;
        y[(size_t)blockIdx.x * C + c] = 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
