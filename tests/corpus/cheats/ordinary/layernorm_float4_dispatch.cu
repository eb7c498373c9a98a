// launch: grid=ceil(N / 4) block=32, 4
__device__ float warp_total(float v) {
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

extern "C" __global__ void layernorm_vec(const float* __restrict__ x, const float* __restrict__ gamma,
                                         const float* __restrict__ beta, float* __restrict__ out, float eps, int N,
                                         int C) {
    const int row = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    if (row >= N) return;
    const float* in = x + (size_t)row * C;
    float* to = out + (size_t)row * C;
    if (C % 4 == 0) {
        const float4* in4 = reinterpret_cast<const float4*>(in);
        const float4* g4 = reinterpret_cast<const float4*>(gamma);
        const float4* b4 = reinterpret_cast<const float4*>(beta);
        float s = 0.0f;
        for (int c = lane; c < C / 4; c += 32) s += in4[c].x + in4[c].y + in4[c].z + in4[c].w;
        const float mu = warp_total(s) / C;
        s = 0.0f;
        for (int c = lane; c < C / 4; c += 32) {
            const float4 v = in4[c];
            s += (v.x - mu) * (v.x - mu) + (v.y - mu) * (v.y - mu) + (v.z - mu) * (v.z - mu) + (v.w - mu) * (v.w - mu);
        }
        const float r = rsqrtf(warp_total(s) / C + eps);
        for (int c = lane; c < C / 4; c += 32) {
            const float4 v = in4[c], g = g4[c], b = b4[c];
            reinterpret_cast<float4*>(to)[c] = make_float4((v.x - mu) * r * g.x + b.x, (v.y - mu) * r * g.y + b.y,
                                                           (v.z - mu) * r * g.z + b.z, (v.w - mu) * r * g.w + b.w);
        }
    } else {
        float s = 0.0f;
        for (int c = lane; c < C; c += 32) s += in[c];
        const float mu = warp_total(s) / C;
        s = 0.0f;
        for (int c = lane; c < C; c += 32) s += (in[c] - mu) * (in[c] - mu);
        const float r = rsqrtf(warp_total(s) / C + eps);
        for (int c = lane; c < C; c += 32) to[c] = (in[c] - mu) * r * gamma[c] + beta[c];
    }
}
