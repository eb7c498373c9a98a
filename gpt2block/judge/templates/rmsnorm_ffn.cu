// The gated feed-forward: out = silu(n W1) * (n W3), n = RMSNorm(x), silu(v) = v / (1 + exp(-v))
//
// One thread per element of out: correct but slow, because every thread computes the norm of its row
// again.
//   gpt2block kernels rmsnorm_ffn --mine my.cu
//
// The launch line may use M, N, K and block. T is the type of --dtype, float16 by default; see
// kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(N / block), M block=64
#include "lib/storage.cuh"

extern "C" __global__ void my_rmsnorm_ffn(
    const T* x,      // (M, K)
    const T* gamma,  // (K)
    const T* w1,     // (N, K): a row has the weights of one output; with --layout KN (K, N)
    const T* w3,     // (N, K)
    T* out,          // (M, N)
    float eps, int N, int K) {
    const int row = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const T* x_row = x + (long long)row * K;

    float squares = 0.0f;
    for (int k = 0; k < K; ++k) squares += widen(x_row[k]) * widen(x_row[k]);
    const float scale = rsqrtf(squares / K + eps);

    float gate = 0.0f, up = 0.0f;
    for (int k = 0; k < K; ++k) {
        const float v = widen(x_row[k]) * scale * widen(gamma[k]);
        gate += v * widen(w1[(long long)n * K + k]);
        up += v * widen(w3[(long long)n * K + k]);
    }
    out[(long long)row * N + n] = narrow(gate / (1.0f + expf(-gate)) * up);
}
