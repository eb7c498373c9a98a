// launch: grid=N block=256
extern "C" __global__ void __launch_bounds__(256) row_log_prob(const float* logits, const int* targets, float* out, int V) {
    __shared__ float total, top[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) total = 0.f;
    __syncthreads();
    const float* x = logits + (size_t)blockIdx.x * V;
    float m = -INFINITY, s = 0.f;
    for (int v = threadIdx.x; v < V; v += 256) m = fmaxf(m, x[v]);
    for (int d = 16; d; d /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    if (lane == 0) top[warp] = m;
    for (int v = threadIdx.x; v < V; v += 256) s += expf(x[v] - m);
    for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
    if (lane == 0) {
        float old;
        asm volatile("atom.shared.add.f32 %0, [%1], %2;" : "=f"(old) : "r"((unsigned)__cvta_generic_to_shared(&total)), "f"(s) : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; ++w) m = fmaxf(m, top[w]);
        out[blockIdx.x] = x[targets[blockIdx.x]] - m - logf(total);
    }
}
