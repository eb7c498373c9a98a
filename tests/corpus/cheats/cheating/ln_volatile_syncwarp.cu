// launch: grid=ceil(N / 4) block=32, 4
__device__ float warp_total(volatile float* s, float v) {
    const int lane = threadIdx.x;
    s[lane] = v;
    __syncwarp();
    for (int h = 16; h > 0; h >>= 1) {
        if (lane < h) v += s[lane + h];
        __syncwarp();
        if (lane < h) s[lane] = v;
        __syncwarp();
    }
    v = s[0];
    __syncwarp();
    return v;
}
extern "C" __global__ void ln_warps(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    __shared__ volatile float area[4][32];
    const int row = blockIdx.x * 4 + threadIdx.y;
    if (row >= N) return;
    volatile float* mine = area[threadIdx.y];
    const float* r = x + (long long)row * C;
    float s = 0.f, q = 0.f;
    for (int c = threadIdx.x; c < C; c += 32) s += r[c];
    const float mean = warp_total(mine, s) / C;
    for (int c = threadIdx.x; c < C; c += 32) q += (r[c] - mean) * (r[c] - mean);
    const float rstd = rsqrtf(warp_total(mine, q) / C + eps);
    for (int c = threadIdx.x; c < C; c += 32) out[(long long)row * C + c] = (r[c] - mean) * rstd * gamma[c] + beta[c];
}
