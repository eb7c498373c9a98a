// Matrix product: C = A B + bias
//
// One thread per element of C: correct but slow, because every thread reads a whole row of A and
// column of B.
//   gpt2block kernels matmul_bias --mine my.cu
//
// The launch line may use M, K, N and block.
// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
extern "C" __global__ void my_matmul(
    const float* A,     // (M, K)
    const float* B,     // (K, N)
    const float* bias,  // (N)
    float* C,           // (M, N)
    int M, int K, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = bias[n];
    for (int k = 0; k < K; ++k) sum += A[(long long)m * K + k] * B[(long long)k * N + n];
    C[(long long)m * N + n] = sum;
}
