// launch: grid=ceil(N / 4) block=32, 4
extern "C" __global__ void __launch_bounds__(128) ln_vec(const float* __restrict__ x, const float* __restrict__ gamma,
                                                        const float* __restrict__ beta, float* __restrict__ out, float eps, int N, int C) {
    const int row = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    if (row >= N) return;
    x += (size_t)row * C;
    out += (size_t)row * C;
    const int quads = C / 4;
    float s = 0.f, q = 0.f;
    for (int i = lane; i < quads; i += 32) {
        float4 v;
        asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(x + 4 * i));
        s += (v.x + v.y) + (v.z + v.w);
    }
    for (int c = 4 * quads + lane; c < C; c += 32) s += x[c];
    for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
    const float mean = s / C;
    for (int c = lane; c < C; c += 32) q += (x[c] - mean) * (x[c] - mean);
    for (int d = 16; d; d /= 2) q += __shfl_xor_sync(~0u, q, d);
    const float rstd = rsqrtf(q / C + eps);
    for (int c = lane; c < C; c += 32) out[c] = (x[c] - mean) * rstd * gamma[c] + beta[c];
}
