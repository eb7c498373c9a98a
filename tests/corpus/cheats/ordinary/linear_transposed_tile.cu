// launch: grid=ceil(N / 32), M block=32, 8
extern "C" __global__ void linear_staged(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    __shared__ float tile[32][8];
    __shared__ float sums[8][32];
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.x * 32, m = blockIdx.y;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += 8) {
        const int n = n0 + tx, k = k0 + ty;
        tile[ty][tx] = n < N && k < K ? w[(long long)n * K + k] : 0.0f;
        __syncthreads();
        if (k < K) sum += x[(long long)m * K + k] * tile[tx][ty];
        __syncthreads();
    }
    sums[ty][tx] = sum;
    __syncthreads();
    if (ty == 0 && n0 + tx < N) {
        for (int s = 1; s < 8; ++s) sum += sums[s][tx];
        out[(long long)m * N + n0 + tx] = sum + bias[n0 + tx];
    }
}
