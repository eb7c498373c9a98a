// launch: grid=ceil(rows / 6) block=192
__device__ void merge(float& m, float& s, float m2, float s2) {
    const float top = fmaxf(m, m2);
    s = (m > -INFINITY ? s * expf(m - top) : 0.f) + (m2 > -INFINITY ? s2 * expf(m2 - top) : 0.f);
    m = top;
}
extern "C" __global__ void softmax_warps(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * 6 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* src = x + (long long)row * n;
    float m = -INFINITY, s = 0.f;
    for (int i = lane; i < n; i += 32) merge(m, s, src[i], 1.0f);
    for (int o = 1; o < 32; o <<= 1) {
        const float m2 = __shfl_xor_sync(0xffffffffu, m, o), s2 = __shfl_xor_sync(0xffffffffu, s, o);
        merge(m, s, m2, s2);
    }
    for (int i = lane; i < n; i += 32) y[(long long)row * n + i] = expf(src[i] - m) / s;
}
