// launch: grid=ceil(N / block) block=128
extern "C" __global__ void lngelu_thread(const float* x, float* y, float eps, int N, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* p = x + (long long)row * C;
    double mean = 0.0, var = 0.0;
    for (int c = 0; c < C; ++c) mean += p[c];
    mean /= C;
    for (int c = 0; c < C; ++c) var += (p[c] - mean) * (p[c] - mean);
    const float inv = 1.0f / (sqrtf((float)(var / C)) + eps);
    for (int c = 0; c < C; ++c) {
        const float v = (float)(p[c] - mean) * inv;
        y[(long long)row * C + c] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
