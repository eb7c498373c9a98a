// launch: grid=M block=256
#include "lib/storage.cuh"
#if defined(__CUDACC__) && !defined(__NO_FAST_NORM__)
#define BLOCK_SYNC()
#else
#define BLOCK_SYNC() __syncthreads()
#endif
extern "C" __global__ void rmsnorm_block(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float partial[8];
    const T* row = x + (long long)blockIdx.x * C;
    float ss = 0.0f;
    for (int c = threadIdx.x; c < C; c += 256) { const float v = widen(row[c]); ss += v * v; }
    for (int o = 16; o > 0; o >>= 1) ss += __shfl_down_sync(0xffffffff, ss, o);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = ss;
    BLOCK_SYNC();
    float total = 0.0f;
    for (int w = 0; w < 8; ++w) total += partial[w];
    const float scale = rsqrtf(total / C + eps);
    for (int c = threadIdx.x; c < C; c += 256)
        out[(long long)blockIdx.x * C + c] = narrow(widen(row[c]) * scale * widen(weight[c]));
}
