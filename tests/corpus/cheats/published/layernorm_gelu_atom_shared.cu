// launch: grid=N block=160
__device__ __forceinline__ void add_shared(float* cell, float v) {
    float old;
    const unsigned at = (unsigned)__cvta_generic_to_shared(cell);
    asm volatile("atom.shared.add.f32 %0, [%1], %2;" : "=f"(old) : "r"(at), "f"(v) : "memory");
}
__device__ __forceinline__ float warp_total(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    return v;
}

extern "C" __global__ void __launch_bounds__(160) ln_gelu(const float* __restrict__ x, float* __restrict__ y, float eps, int C) {
    __shared__ float cells[2];
    if (threadIdx.x < 2) cells[threadIdx.x] = 0.0f;
    __syncthreads();
    x += (size_t)blockIdx.x * C;
    y += (size_t)blockIdx.x * C;
    float s = 0.0f;
    for (int c = threadIdx.x; c < C; c += 160) s += x[c];
    s = warp_total(s);
    if ((threadIdx.x & 31) == 0) add_shared(&cells[0], s);
    __syncthreads();
    const float mean = cells[0] / C;
    float q = 0.0f;
    for (int c = threadIdx.x; c < C; c += 160) q += (x[c] - mean) * (x[c] - mean);
    q = warp_total(q);
    if ((threadIdx.x & 31) == 0) add_shared(&cells[1], q);
    __syncthreads();
    const float rstd = rsqrtf(cells[1] / C + eps);
    for (int c = threadIdx.x; c < C; c += 160) {
        const float v = (x[c] - mean) * rstd;
        const float u = 0.7978845608f * fmaf(0.044715f * v * v, v, v);
        y[c] = v / (1.0f + __expf(-2.0f * u));
    }
}
