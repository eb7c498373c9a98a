// launch: grid=ceil(rows / block) block=32
extern "C" __global__ void softmax_per_thread(const float* x, float* y, int rows, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* in = x + (long long)row * n;
    float* out = y + (long long)row * n;
    float biggest = 0.0f;
    for (int i = 0; i < n; i++)
        if (in[i] > biggest) biggest = in[i];
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        out[i] = expf(in[i] - biggest);
        total += out[i];
    }
    for (int i = 0; i < n; i++) out[i] /= total;
}
