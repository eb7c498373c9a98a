// launch: grid=ceil(N / 32), M, 4 block=32, 8
extern "C" __global__ void __launch_bounds__(256) linear_splits(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    const int m = blockIdx.y, lane = threadIdx.x, share = (K + 3) / 4;
    const int from = blockIdx.z * share, to = min(K, from + share), n0 = blockIdx.x * 32;
    if (blockIdx.z == 0) {
        if (threadIdx.y == 0 && n0 + lane < N) out[(size_t)m * N + n0 + lane] = bias[n0 + lane];
        __threadfence();
    }
    __syncthreads();
    for (int n = n0 + threadIdx.y; n < min(N, n0 + 32); n += 8) {
        float s = 0.f;
        for (int k = from + lane; k < to; k += 32) s += x[(size_t)m * K + k] * w[(size_t)n * K + k];
        for (int d = 16; d > 0; d >>= 1) s += __shfl_down_sync(0xffffffffu, s, d);
        if (lane == 0) atomicAdd(out + (size_t)m * N + n, s);
    }
}
