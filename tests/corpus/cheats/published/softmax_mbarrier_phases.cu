// launch: grid=rows block=128
__device__ __forceinline__ void arrive(unsigned bar) {
    asm volatile("{\n.reg .b64 token;\nmbarrier.arrive.shared.b64 token, [%0];\n}" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void wait(unsigned bar, int parity) {
    int done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}

extern "C" __global__ void __launch_bounds__(128) softmax_two_phases(const float* x, float* y, int n) {
    __shared__ __align__(8) unsigned long long object;
    __shared__ float tops[4], sums[4];
    const unsigned bar = (unsigned)__cvta_generic_to_shared(&object);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(128) : "memory");
    __syncthreads();
    const float* in = x + (size_t)blockIdx.x * n;
    float m = -INFINITY, s = 0.f;
    for (int i = threadIdx.x; i < n; i += 128) m = fmaxf(m, in[i]);
    for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    if (lane == 0) tops[warp] = m;
    arrive(bar);
    wait(bar, 0);
    m = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    for (int i = threadIdx.x; i < n; i += 128) s += __expf(in[i] - m);
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
    if (lane == 0) sums[warp] = s;
    arrive(bar);
    wait(bar, 0);
    s = sums[0] + sums[1] + sums[2] + sums[3];
    for (int i = threadIdx.x; i < n; i += 128) y[(size_t)blockIdx.x * n + i] = __expf(in[i] - m) / s;
}
