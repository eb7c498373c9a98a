// launch: grid=N block=1
__device__ __noinline__ float pairwise(const float* x, int n, float m) {
    if (n <= 1024) {
        float s = 0.f;
        for (int i = 0; i < n; ++i) s += expf(x[i] - m);
        return s;
    }
    const int half = n / 2;
    return pairwise(x, half, m) + pairwise(x + half, n - half, m);
}
extern "C" __global__ void loglik_recursive(const float* logits, const int* targets, float* out, int N, int V) {
    const float* x = logits + (long long)blockIdx.x * V;
    float m = x[0];
    for (int v = 1; v < V; ++v) m = fmaxf(m, x[v]);
    out[blockIdx.x] = x[targets[blockIdx.x]] - m - logf(pairwise(x, V, m));
}
