// launch: grid=ceil(rows / 4) block=128
#define LOG2E 1.4426950408889634f
__device__ __forceinline__ float bfly(float v, int mask) {
    float r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(r) : "f"(v), "r"(mask));
    return r;
}
__device__ __forceinline__ float exp_ptx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * LOG2E));
    return r;
}

extern "C" __global__ void softmax_warp(const float* __restrict__ x, float* __restrict__ y, int rows, int n) {
    unsigned lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const float* in = x + (size_t)row * n;
    float* to = y + (size_t)row * n;

    float m = -INFINITY, s = 0.0f;
    for (int i = lane; i < n; i += 32) {
        const float v = in[i];
        if (v > m) {
            s = s * exp_ptx(m - v) + 1.0f;
            m = v;
        } else if (m != -INFINITY) {
            s += exp_ptx(v - m);
        }
    }
    for (int d = 16; d; d >>= 1) {
        const float m2 = bfly(m, d), s2 = bfly(s, d);
        const float top = fmaxf(m, m2);
        const float safe = top == -INFINITY ? 0.0f : top;
        s = s * exp_ptx(m - safe) + s2 * exp_ptx(m2 - safe);
        m = top;
    }
    const float inv = 1.0f / s;
    for (int i = lane; i < n; i += 32) to[i] = exp_ptx(in[i] - m) * inv;
}
