// launch: grid=ceil(C / block), N block=64
extern "C" __global__ void lngelu_slow(const float* x, float* y, float eps, int N, int C) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    const float* r = x + (long long)blockIdx.y * C;
    double sum = 0.0, squares = 0.0;
    for (int k = 0; k < C; ++k) sum += (double)r[(c + k) % C];
    const double mean = sum / C;
    for (int k = 0; k < C; ++k) { const double d = r[(c + k) % C] - mean; squares += d * d; }
    const float v = (float)((r[c] - mean) / sqrt(squares / C + (double)eps));
    y[(long long)blockIdx.y * C + c] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
}
