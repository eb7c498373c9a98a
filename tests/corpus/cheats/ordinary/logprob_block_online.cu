// launch: grid=N block=256
extern "C" __global__ void logprob_block(const float* logits, const int* targets, float* out, int V) {
    __shared__ float maxima[256], sums[256];
    const int t = threadIdx.x;
    const float* row = logits + (long long)blockIdx.x * V;
    float m = -FLT_MAX, s = 0.0f;
    for (int v = t; v < V; v += blockDim.x) {
        const float value = row[v];
        if (value > m) {
            s = s * expf(m - value) + 1.0f;
            m = value;
        } else {
            s += expf(value - m);
        }
    }
    maxima[t] = m;
    sums[t] = s;
    __syncthreads();
    for (int stride = 128; stride > 0; stride /= 2) {
        if (t < stride) {
            const float big = fmaxf(maxima[t], maxima[t + stride]);
            sums[t] = sums[t] * expf(maxima[t] - big) + sums[t + stride] * expf(maxima[t + stride] - big);
            maxima[t] = big;
        }
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = row[targets[blockIdx.x]] - maxima[0] - logf(sums[0]);
}
