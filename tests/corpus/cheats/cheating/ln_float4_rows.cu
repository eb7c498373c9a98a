// launch: grid=ceil(N / 8) block=32, 8
extern "C" __global__ void ln_vec(const float* x, const float* gamma, const float* beta, float* out, float eps, int N, int C) {
    const int row = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x;
    if (row >= N) return;
    const float* r = x + (long long)row * C;
    const int quads = C / 4;
    float s = 0.f;
    for (int i = lane; i < quads; i += 32) { const float4 v = reinterpret_cast<const float4*>(r)[i]; s += v.x + v.y + v.z + v.w; }
    for (int c = quads * 4 + lane; c < C; c += 32) s += r[c];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    const float mu = s / C;
    float q = 0.f;
    for (int i = lane; i < quads; i += 32) {
        const float4 v = reinterpret_cast<const float4*>(r)[i];
        q += (v.x - mu) * (v.x - mu) + (v.y - mu) * (v.y - mu) + (v.z - mu) * (v.z - mu) + (v.w - mu) * (v.w - mu);
    }
    for (int c = quads * 4 + lane; c < C; c += 32) q += (r[c] - mu) * (r[c] - mu);
    for (int o = 16; o; o >>= 1) q += __shfl_xor_sync(~0u, q, o);
    const float rs = rsqrtf(q / C + eps);
    for (int c = lane; c < C; c += 32) out[(long long)row * C + c] = (r[c] - mu) * rs * gamma[c] + beta[c];
}
