// launch: grid=rows block=64
extern "C" __global__ void softmax_lock(const float* x, float* y, int rows, int n) {
    __shared__ int lock;
    __shared__ volatile float top, total;
    const long long base = (long long)blockIdx.x * n;
    if (threadIdx.x == 0) { lock = 0; top = -INFINITY; total = 0.f; }
    __syncthreads();
    float m = -INFINITY, s = 0.f;
    for (int i = threadIdx.x; i < n; i += 64) m = fmaxf(m, x[base + i]);
    if (m > -INFINITY) for (int i = threadIdx.x; i < n; i += 64) s += expf(x[base + i] - m);
    bool done = s == 0.f;
    while (!done) {
        if (atomicCAS(&lock, 0, 1) == 0) {
            __threadfence_block();
            const float old = top, high = fmaxf(old, m);
            const float kept = old > -INFINITY ? total * expf(old - high) : 0.f;
            total = kept + s * expf(m - high);
            top = high;
            __threadfence_block();
            atomicExch(&lock, 0);
            done = true;
        }
    }
    __syncthreads();
    const float high = top, inv = 1.0f / total;
    for (int i = threadIdx.x; i < n; i += 64) y[base + i] = expf(x[base + i] - high) * inv;
}
