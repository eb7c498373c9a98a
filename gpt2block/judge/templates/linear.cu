// Matrix product of few rows, as in decoding: out = x W + bias
//
// One thread per element of out: correct but slow, because neighbouring threads read addresses a row
// apart.
//   gpt2block kernels linear --mine my.cu
//
// The launch line may use M, N, K and block.
// launch: grid=ceil(N / block), M block=64
extern "C" __global__ void my_linear(
    const float* x,     // (M, K)
    const float* w,     // (N, K): a row has the weights of one output; with --layout KN (K, N)
    const float* bias,  // (N)
    float* out,         // (M, N)
    int N, int K) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float sum = bias[n];
    for (int k = 0; k < K; ++k) sum += x[(long long)m * K + k] * w[(long long)n * K + k];
    out[(long long)m * N + n] = sum;
}
