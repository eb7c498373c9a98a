// launch: grid=N block=256
extern "C" __global__ void loglik_prob(const float* logits, const int* targets, float* out, int N, int V) {
    __shared__ float sh[256];
    const float* x = logits + (long long)blockIdx.x * V;
    const int t = threadIdx.x;
    float m = -INFINITY, s = 0.f;
    for (int v = t; v < V; v += 256) m = fmaxf(m, x[v]);
    sh[t] = m;
    for (int h = 128; h; h >>= 1) { __syncthreads(); if (t < h) sh[t] = fmaxf(sh[t], sh[t + h]); }
    __syncthreads();
    m = sh[0];
    __syncthreads();
    for (int v = t; v < V; v += 256) s += expf(x[v] - m);
    sh[t] = s;
    for (int h = 128; h; h >>= 1) { __syncthreads(); if (t < h) sh[t] += sh[t + h]; }
    if (t == 0) out[blockIdx.x] = logf(expf(x[targets[blockIdx.x]] - m) / sh[0]);
}
