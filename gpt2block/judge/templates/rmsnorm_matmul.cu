// RMSNorm, a matrix product, then RoPE on heads of head_dim columns:
//
//   n = x / sqrt(mean(x^2) + eps) * gamma,   y = n W
//   out: the pairs (y[2k], y[2k + 1]) of each head, rotated by the angle row / theta^(2k / head_dim)
//
// One thread per pair of columns: correct but slow, because every thread computes the norm of its row
// again.
//   gpt2block kernels rmsnorm_matmul --mine my.cu
//
// The launch line may use M, N, K, head_dim and block. T is the type of --dtype, float16 by default;
// see kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(N / 2 / block), M block=64
#include "lib/storage.cuh"

extern "C" __global__ void my_rmsnorm_matmul(
    const T* x,      // (M, K)
    const T* gamma,  // (K)
    const T* w,      // (K, N)
    T* out,          // (M, N)
    float eps, int N, int K, int head_dim, float theta) {
    const int row = blockIdx.y, first = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= N) return;
    const T* x_row = x + (long long)row * K;

    float squares = 0.0f;
    for (int k = 0; k < K; ++k) squares += widen(x_row[k]) * widen(x_row[k]);
    const float scale = rsqrtf(squares / K + eps);

    float r = 0.0f, i = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float n = widen(x_row[k]) * scale * widen(gamma[k]);
        r += n * widen(w[(long long)k * N + first]);
        i += n * widen(w[(long long)k * N + first + 1]);
    }

    const float angle = row / powf(theta, (float)(first % head_dim) / head_dim);
    out[(long long)row * N + first] = narrow(r * cosf(angle) - i * sinf(angle));
    out[(long long)row * N + first + 1] = narrow(r * sinf(angle) + i * cosf(angle));
}
