// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#define T16 16

extern "C" __global__ void matmul_shared(const float* A, const float* B, const float* bias, float* C, int M, int K,
                                         int N) {
    __shared__ float sA[T16][T16];
    __shared__ float sB[T16][T16];
    int r = blockIdx.y * T16 + threadIdx.y;
    int c = blockIdx.x * T16 + threadIdx.x;
    sA[threadIdx.y][threadIdx.x] = 0.0f;
    sB[threadIdx.y][threadIdx.x] = 0.0f;
    float acc = 0.0f;
    for (int t = 0; t < (K + T16 - 1) / T16; t++) {
        if (r < M && t * T16 + threadIdx.x < K) sA[threadIdx.y][threadIdx.x] = A[r * K + t * T16 + threadIdx.x];
        if (c < N && t * T16 + threadIdx.y < K) sB[threadIdx.y][threadIdx.x] = B[(t * T16 + threadIdx.y) * N + c];
        __syncthreads();
        for (int k = 0; k < T16; k++) acc += sA[threadIdx.y][k] * sB[k][threadIdx.x];
        __syncthreads();
    }
    if (r < M && c < N) C[r * N + c] = acc + bias[c];
}
