// launch: grid=rows block=n shared=4 * n
extern "C" __global__ void softmax_columns(const float* x, float* y, int n) {
    extern __shared__ float s[];
    const int t = threadIdx.x;
    const long long i = (long long)blockIdx.x * n + t;
    const float v = x[i];
    s[t] = v;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half >>= 1) {
        if (t < half) s[t] = fmaxf(s[t], s[t + half]);
        __syncthreads();
    }
    const float m = s[0];
    __syncthreads();
    const float e = expf(v - m);
    s[t] = e;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half >>= 1) {
        if (t < half) s[t] += s[t + half];
        __syncthreads();
    }
    y[i] = e / s[0];
}
