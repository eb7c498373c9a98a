// launch: grid=ceil(N / 4) block=128
extern "C" __global__ void __launch_bounds__(128) log_prob(const float* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ out, int N, int V) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* x = logits + (size_t)row * V;
    float m = -INFINITY, s = 0.f;
    for (int v = lane; v < V; v += 32) m = fmaxf(m, x[v]);
    for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    for (int v = lane; v < V; v += 32) s += __expf(x[v] - m);
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
    float l;
    asm("lg2.approx.f32 %0, %1;" : "=f"(l) : "f"(s));
    if (lane == 0) out[row] = x[targets[row]] - m - l;
}
