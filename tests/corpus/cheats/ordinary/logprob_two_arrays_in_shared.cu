// launch: grid=N block=256 shared=8 * V
extern "C" __global__ void logprob_cached(const float* logits, const int* targets, float* out, int V) {
    extern __shared__ float memory[];
    __shared__ float red[256];
    float* row = memory;
    float* exps = memory + V;
    const int t = threadIdx.x;
    float m = -INFINITY;
    for (int v = t; v < V; v += 256) {
        row[v] = logits[(long long)blockIdx.x * V + v];
        m = fmaxf(m, row[v]);
    }
    red[t] = m;
    __syncthreads();
    for (int h = 128; h > 0; h /= 2) {
        if (t < h) red[t] = fmaxf(red[t], red[t + h]);
        __syncthreads();
    }
    m = red[0];
    __syncthreads();
    float s = 0.0f;
    for (int v = t; v < V; v += 256) {
        exps[v] = expf(row[v] - m);
        s += exps[v];
    }
    red[t] = s;
    __syncthreads();
    for (int h = 128; h > 0; h /= 2) {
        if (t < h) red[t] += red[t + h];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = row[targets[blockIdx.x]] - m - logf(red[0]);
}
