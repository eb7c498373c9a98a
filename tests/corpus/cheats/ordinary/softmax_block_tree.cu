// launch: grid=rows block=128
#define THREADS 128

extern "C" __global__ void softmax_tree(const float* x, float* y, int rows, int n) {
    __shared__ float buf[THREADS];
    const int tid = threadIdx.x;
    const float* in = x + (size_t)blockIdx.x * n;
    float* out = y + (size_t)blockIdx.x * n;

    float m = -INFINITY;
    for (int i = tid; i < n; i += THREADS) m = fmaxf(m, in[i]);
    buf[tid] = m;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s >>= 1) {
        if (tid < s) buf[tid] = fmaxf(buf[tid], buf[tid + s]);
        __syncthreads();
    }
    m = buf[0];
    __syncthreads();

    float sum = 0.0f;
    for (int i = tid; i < n; i += THREADS) sum += expf(in[i] - m);
    buf[tid] = sum;
    __syncthreads();
    for (int s = THREADS / 2; s > 0; s >>= 1) {
        if (tid < s) buf[tid] += buf[tid + s];
        __syncthreads();
    }
    const float inv = 1.0f / buf[0];
    for (int i = tid; i < n; i += THREADS) out[i] = expf(in[i] - m) * inv;
}
