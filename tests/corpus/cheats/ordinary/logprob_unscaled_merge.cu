// launch: grid=ceil(N / 4) block=128
extern "C" __global__ void logprob_warp(const float* logits, const int* targets, float* out, int N, int V) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* in = logits + (long long)row * V;
    float m = -1e30f, s = 0.0f;
    for (int v = lane; v < V; v += 32) {
        const float next = fmaxf(m, in[v]);
        s = s * expf(m - next) + expf(in[v] - next);
        m = next;
    }
    for (int o = 16; o > 0; o >>= 1) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, o));
        s += __shfl_xor_sync(0xffffffffu, s, o);
    }
    if (lane == 0) out[row] = in[targets[row]] - m - logf(s);
}
