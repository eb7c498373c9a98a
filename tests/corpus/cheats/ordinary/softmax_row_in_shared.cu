// Keeps the row in shared memory, so that x is read once.
// launch: grid=rows block=96 shared=4 * n
extern "C" __global__ void softmax_cached(const float* x, float* y, int n) {
    extern __shared__ float row[];
    __shared__ float partial[3];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long base = (long long)blockIdx.x * n;

    float m = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        row[i] = x[base + i];
        m = fmaxf(m, row[i]);
    }
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    if (lane == 0) partial[warp] = m;
    __syncthreads();
    m = fmaxf(partial[0], fmaxf(partial[1], partial[2]));
    __syncthreads();

    float s = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float e = expf(row[i] - m);
        row[i] = e;
        s += e;
    }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (lane == 0) partial[warp] = s;
    __syncthreads();
    s = partial[0] + partial[1] + partial[2];
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[base + i] = row[i] / s;
}
