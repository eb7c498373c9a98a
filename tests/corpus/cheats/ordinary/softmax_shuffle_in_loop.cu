// launch: grid=rows block=32
extern "C" __global__ void softmax_one_warp(const float* x, float* y, int n) {
    const int lane = threadIdx.x;
    const float* in = x + (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = lane; i < n; i += 32) {
        float v = in[i];
        for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, o));
        m = fmaxf(m, v);
    }
    m = __shfl_sync(0xffffffff, m, 0);
    float sum = 0.0f;
    for (int i = lane; i < n; i += 32) sum += expf(in[i] - m);
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);
    for (int i = lane; i < n; i += 32) y[(long long)blockIdx.x * n + i] = expf(in[i] - m) / sum;
}
