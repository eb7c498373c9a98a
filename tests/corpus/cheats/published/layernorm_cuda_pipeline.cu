#include <cooperative_groups.h>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
constexpr int CHUNK = 128;

// launch: grid=N block=128
extern "C" __global__ void __launch_bounds__(128) ln_pipelined(const float* x, const float* gamma, const float* beta, float* out, float eps, int C) {
    __shared__ float stage[2][CHUNK];
    __shared__ float warps[4];
    auto block = cg::this_thread_block();
    cuda::pipeline<cuda::thread_scope_thread> pipe = cuda::make_pipeline();
    const float* row = x + (size_t)blockIdx.x * C;
    const int chunks = (C + CHUNK - 1) / CHUNK;

    auto copy = [&](int t) {
        pipe.producer_acquire();
        const int c = t * CHUNK + (int)threadIdx.x;
        if (c < C) cuda::memcpy_async(&stage[t & 1][threadIdx.x], row + c, sizeof(float), pipe);
        pipe.producer_commit();
    };
    float mean = 0.f, rstd = 0.f;
    for (int pass = 0; pass < 2; ++pass) {
        float v = 0.f;
        copy(0);
        for (int t = 0; t < chunks; ++t) {
            if (t + 1 < chunks) copy(t + 1);
            pipe.consumer_wait();
            block.sync();
            const int i = CHUNK - 1 - (int)threadIdx.x;
            if (t * CHUNK + i < C) {
                const float e = stage[t & 1][i] - mean;
                v += pass ? e * e : e;
            }
            block.sync();
            pipe.consumer_release();
        }
        for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
        block.sync();
        const float total = warps[0] + warps[1] + warps[2] + warps[3];
        block.sync();
        if (pass == 0) mean = total / C;
        else rstd = rsqrtf(total / C + eps);
    }
    for (int c = threadIdx.x; c < C; c += 128) out[(size_t)blockIdx.x * C + c] = (row[c] - mean) * rstd * gamma[c] + beta[c];
}
