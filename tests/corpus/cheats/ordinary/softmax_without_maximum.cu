// launch: grid=ceil(rows / 8) block=32, 8
extern "C" __global__ void softmax_direct(const float* x, float* y, int rows, int n) {
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const float* in = x + (long long)row * n;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += 32) {
        float e = expf(in[i]);
        y[(long long)row * n + i] = e;
        sum += e;
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, o);
    for (int i = threadIdx.x; i < n; i += 32) y[(long long)row * n + i] /= sum;
}
