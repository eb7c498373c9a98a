// launch: grid=N block=32
__device__ float warp_max(float v) {
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, o));
    return v;
}
__device__ float warp_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffff, v, o);
    return v;
}
extern "C" __global__ void loglik_warp(const float* logits, const int* targets, float* out, int N, int V) {
    const float* x = logits + (long long)blockIdx.x * V;
    float m = -INFINITY, s = 0.0f;
    for (int v = threadIdx.x; v < V; v += 32) {
        const float top = fmaxf(m, warp_max(x[v]));
        if (top > -INFINITY) {
            s = s * expf(m - top) + warp_sum(expf(x[v] - top));
            m = top;
        }
    }
    if (threadIdx.x == 0) out[blockIdx.x] = x[targets[blockIdx.x]] - m - logf(s);
}
