// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#include <cuda_fp16.h>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 530
typedef __half acc_t;
__device__ acc_t zero_acc() { return __float2half(0.0f); }
__device__ acc_t mad(float a, float b, acc_t c) { return __hfma(__float2half(a), __float2half(b), c); }
__device__ float value(acc_t c) { return __half2float(c); }
#else
typedef float acc_t;
__device__ acc_t zero_acc() { return 0.0f; }
__device__ acc_t mad(float a, float b, acc_t c) { return a * b + c; }
__device__ float value(acc_t c) { return c; }
#endif
extern "C" __global__ void matmul_acc(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    acc_t sum = zero_acc();
    for (int k = 0; k < K; ++k) sum = mad(A[(long long)m * K + k], B[(long long)k * N + n], sum);
    C[(long long)m * N + n] = value(sum) + bias[n];
}
