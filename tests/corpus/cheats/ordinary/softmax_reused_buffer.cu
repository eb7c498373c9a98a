// launch: grid=rows block=256
extern "C" __global__ void softmax_shared(const float* x, float* y, int rows, int n) {
    __shared__ float buf[256];
    const int t = threadIdx.x;
    const float* in = x + (long long)blockIdx.x * n;
    float m = -INFINITY;
    for (int i = t; i < n; i += blockDim.x) m = fmaxf(m, in[i]);
    buf[t] = m;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s) buf[t] = fmaxf(buf[t], buf[t + s]);
        __syncthreads();
    }
    const float largest = buf[0];
    float sum = 0.0f;
    for (int i = t; i < n; i += blockDim.x) sum += expf(in[i] - largest);
    buf[t] = sum;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (t < s) buf[t] += buf[t + s];
        __syncthreads();
    }
    for (int i = t; i < n; i += blockDim.x) y[(long long)blockIdx.x * n + i] = expf(in[i] - largest) / buf[0];
}
