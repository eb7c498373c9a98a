// 16 outputs of one row per block; eight warps divide K.
// launch: grid=ceil(N / 16), M block=256
extern "C" __global__ void __launch_bounds__(256) decode_linear(const float* __restrict__ x, const float* __restrict__ w,
                                                                const float* __restrict__ bias, float* out, int N, int K) {
    const int n0 = blockIdx.x * 16, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* to = out + (size_t)blockIdx.y * N;
    if (threadIdx.x < 16 && n0 + threadIdx.x < N) to[n0 + threadIdx.x] = bias[n0 + threadIdx.x];
    __syncthreads();
    x += (size_t)blockIdx.y * K;
    for (int n = n0; n < n0 + 16 && n < N; ++n) {
        float s = 0.0f;
        for (int k = warp * 32 + lane; k < K; k += 256) s = fmaf(x[k], w[(size_t)n * K + k], s);
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) s += __shfl_down_sync(0xffffffffu, s, d);
        if (lane == 0) asm volatile("red.global.add.f32 [%0], %1;" :: "l"(to + n), "f"(s) : "memory");
    }
}
