// launch: grid=ceil(N / 4), ceil(K / 256), M block=128
extern "C" __global__ void __launch_bounds__(128) linear_red(const float* __restrict__ x, const float* __restrict__ w,
                                                            const float* __restrict__ bias, float* out, int N, int K) {
    const int n = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const float* row = x + (size_t)blockIdx.z * K;
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int k = blockIdx.y * 256 + i * 32 + lane;
        if (k < K) s = fmaf(row[k], w[(size_t)n * K + k], s);
    }
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
    if (lane == 0) {
        if (blockIdx.y == 0) s += bias[n];
        asm volatile("red.global.add.f32 [%0], %1;" :: "l"(out + (size_t)blockIdx.z * N + n), "f"(s) : "memory");
    }
}
