#include <cuda/pipeline>
// launch: grid=N block=128
extern "C" __global__ void __launch_bounds__(128) ln_chunks(const float* x, const float* gamma, const float* beta, float* out, float eps, int C) {
    __shared__ float chunk[2][128];
    __shared__ float cells[4];
    auto pipe = cuda::make_pipeline();
    const float* row = x + (size_t)blockIdx.x * C;
    const int tid = threadIdx.x, count = (C + 127) / 128;
    auto fetch = [&](int t) {
        pipe.producer_acquire();
        if (t * 128 + tid < C) cuda::memcpy_async(&chunk[t % 2][tid], row + t * 128 + tid, sizeof(float), pipe);
        pipe.producer_commit();
    };
    auto all = [&](float v) {
        for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        __syncthreads();
        if (tid % 32 == 0) cells[tid / 32] = v;
        __syncthreads();
        return cells[0] + cells[1] + cells[2] + cells[3];
    };
    float s = 0.f, q = 0.f;
    fetch(0);
    for (int t = 0; t < count; ++t) {
        if (t + 1 < count) fetch(t + 1);
        if (t * 128 + tid < C) s += chunk[t % 2][tid];
        pipe.consumer_release();
    }
    const float mean = all(s) / C;
    for (int c = tid; c < C; c += 128) q += (row[c] - mean) * (row[c] - mean);
    const float rstd = rsqrtf(all(q) / C + eps);
    for (int c = tid; c < C; c += 128) out[(size_t)blockIdx.x * C + c] = (row[c] - mean) * rstd * gamma[c] + beta[c];
}
