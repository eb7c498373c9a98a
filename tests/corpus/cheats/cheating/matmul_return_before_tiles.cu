// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#define TS 16
extern "C" __global__ void matmul_shared(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float ta[TS][TS], tb[TS][TS];
    const int col = blockIdx.x * TS + threadIdx.x;
    const int row = blockIdx.y * TS + threadIdx.y;
    if (row >= M || col >= N) return;
    float acc = bias[col];
    for (int base = 0; base < K; base += TS) {
        ta[threadIdx.y][threadIdx.x] = base + threadIdx.x < K ? A[(long long)row * K + base + threadIdx.x] : 0.0f;
        tb[threadIdx.y][threadIdx.x] = base + threadIdx.y < K ? B[(long long)(base + threadIdx.y) * N + col] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TS; ++k) acc += ta[threadIdx.y][k] * tb[k][threadIdx.x];
        __syncthreads();
    }
    C[(long long)row * N + col] = acc;
}
