// launch: grid=rows block=32
__device__ __forceinline__ float swap_with(float v, int distance) {
    float r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(r) : "f"(v), "r"(distance));
    return r;
}

extern "C" __global__ void __launch_bounds__(32) softmax_row(const float* __restrict__ x, float* __restrict__ y, int n) {
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    x += (size_t)blockIdx.x * n;
    y += (size_t)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = lane; i < n; i += 32) m = fmaxf(m, x[i]);
    for (int d = 16; d > 1; d /= 2) m = fmaxf(m, swap_with(m, d));
    float s = 0.f;
    for (int i = lane; i < n; i += 32) s += expf(x[i] - m);
    for (int d = 16; d > 1; d /= 2) s += swap_with(s, d);
    for (int i = lane; i < n; i += 32) y[i] = expf(x[i] - m) / s;
}
