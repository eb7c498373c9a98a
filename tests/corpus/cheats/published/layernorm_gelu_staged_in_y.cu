// launch: grid=N block=128
__device__ __forceinline__ float load_nc(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ float total(float v, float* cells) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = v;
    __syncthreads();
    return cells[0] + cells[1] + cells[2] + cells[3];
}

extern "C" __global__ void __launch_bounds__(128) norm_then_gelu(const float* x, float* y, float eps, int C) {
    __shared__ float first[4], second[4];
    const float* row = x + (size_t)blockIdx.x * C;
    float* to = y + (size_t)blockIdx.x * C;
    float s = 0.0f, q = 0.0f;
    for (int c = threadIdx.x; c < C; c += 128) s += load_nc(row + c);
    const float mean = total(s, first) / C;
    for (int c = threadIdx.x; c < C; c += 128) to[c] = row[c] - mean;
    __syncthreads();
    for (int c = C - 1 - threadIdx.x; c >= 0; c -= 128) {
        const float d = load_nc(to + c);
        q += d * d;
    }
    const float rstd = rsqrtf(total(q, second) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) {
        const float v = load_nc(to + c) * rstd;
        to[c] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
