// launch: grid=ceil(rows / 4) block=32, 4
struct Running {
    float largest, sum;
};

__device__ Running merge(Running a, Running b) {
    const float m = fmaxf(a.largest, b.largest);
    if (m == -INFINITY) return {m, 0.0f};
    return {m, a.sum * expf(a.largest - m) + b.sum * expf(b.largest - m)};
}

extern "C" __global__ void softmax_online(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const float* in = x + (long long)row * n;
    Running state = {-INFINITY, 0.0f};
    for (int i = threadIdx.x; i < n; i += 32) state = merge(state, Running{in[i], 1.0f});
    for (int offset = 16; offset > 0; offset /= 2) {
        Running other;
        other.largest = __shfl_xor_sync(0xffffffffu, state.largest, offset);
        other.sum = __shfl_xor_sync(0xffffffffu, state.sum, offset);
        state = merge(state, other);
    }
    for (int i = threadIdx.x; i < n; i += 32) y[(long long)row * n + i] = expf(in[i] - state.largest) / state.sum;
}
