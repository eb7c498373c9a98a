// launch: grid=ceil(N / 32), ceil(M / 32) block=32, 32
extern "C" __global__ void matmul_32(const float* A, const float* B, const float* bias, float* C, int M, int K,
                                     int N) {
    __shared__ float at[32][33], bt[32][33];
    const int x = threadIdx.x, y = threadIdx.y;
    const int m = blockIdx.y * 32 + y, n = blockIdx.x * 32 + x;
    float acc = n < N ? bias[n] : 0.0f;
    for (int k0 = 0; k0 < K; k0 += 32) {
        at[y][x] = m < M && k0 + x < K ? A[(long long)m * K + k0 + x] : 0.0f;
        bt[y][x] = n < N && k0 + y < K ? B[(long long)(k0 + y) * N + n] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; ++k) acc += at[y][k] * bt[k][x];
    }
    if (m < M && n < N) C[(long long)m * N + n] = acc;
}
