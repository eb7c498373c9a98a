// launch: grid=ceil(rows / 8) block=256
extern "C" __global__ void softmax_online(const float* x, float* y, int rows, int n) {
    const int lane = threadIdx.x & 31;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= rows) return;
    const float* in = x + (size_t)row * n;
    float m = -INFINITY, s = 0.0f;
    for (int i = lane; i < n; i += 32) {
        const float v = in[i];
        if (v > m) { s = s * __expf(m - v) + 1.0f; m = v; }
        else if (m > -INFINITY) s += __expf(v - m);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, offset));
        s += __shfl_xor_sync(0xffffffff, s, offset);
    }
    for (int i = lane; i < n; i += 32) y[(size_t)row * n + i] = __expf(in[i] - m) / s;
}
