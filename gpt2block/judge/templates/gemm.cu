// Matrix product in 16 bits, with sums in float: out = a W
//
// One thread per element of out: correct but slow, because every thread reads whole rows of a and W.
//   gpt2block kernels gemm --mine my.cu
//
// The launch line may use M, N, K and block. T is the type of --dtype, bfloat16 by default; see
// kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#include "lib/storage.cuh"

extern "C" __global__ void my_gemm(
    const T* a,  // (M, K)
    const T* w,  // (N, K): a row has the weights of one output; with --layout KN (K, N)
    T* out,      // (M, N)
    int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += widen(a[(long long)m * K + k]) * widen(w[(long long)n * K + k]);
    out[(long long)m * N + n] = narrow(sum);
}
