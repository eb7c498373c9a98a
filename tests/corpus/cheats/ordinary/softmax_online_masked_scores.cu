// launch: grid=ceil(rows / block) block=64
extern "C" __global__ void softmax_two_passes(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* in = x + (long long)row * n;
    float m = -INFINITY, d = 0.0f;
    for (int i = 0; i < n; ++i) {
        const float next = fmaxf(m, in[i]);
        d = d * expf(m - next) + expf(in[i] - next);
        m = next;
    }
    for (int i = 0; i < n; ++i) y[(long long)row * n + i] = expf(in[i] - m) / d;
}
