// launch: grid=rows block=1
extern "C" __global__ void softmax_one(const float* x, float* y, int rows, int n) {
    const long long at = (long long)blockIdx.x * n;
    float m = -INFINITY;
    double s = 0.0;
    for (int i = 0; i < n; ++i) m = fmaxf(m, x[at + i]);
    for (int i = 0; i < n; ++i) { const float e = expf(x[at + i] - m); y[at + i] = e; s += e; }
    const float inv = (float)(1.0 / s);
    for (int i = 0; i < n; ++i) y[at + i] *= inv;
}
