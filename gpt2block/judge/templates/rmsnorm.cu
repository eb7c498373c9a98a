// RMSNorm: out = x / sqrt(mean(x^2) + eps) * weight over each row
//
// One thread per row: correct but slow, because neighbouring threads read addresses a row apart.
//   gpt2block kernels rmsnorm --mine my.cu
//
// The launch line may use M, C and block. T is the type of --dtype, float16 by default; see
// kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(M / block) block=64
#include "lib/storage.cuh"

extern "C" __global__ void my_rmsnorm(
    const T* x,       // (M, C)
    const T* weight,  // (C)
    T* out,           // (M, C)
    float eps, int M, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M) return;
    const T* x_row = x + (long long)row * C;

    float squares = 0.0f;
    for (int c = 0; c < C; ++c) squares += widen(x_row[c]) * widen(x_row[c]);
    const float scale = rsqrtf(squares / C + eps);

    for (int c = 0; c < C; ++c) out[(long long)row * C + c] = narrow(widen(x_row[c]) * scale * widen(weight[c]));
}
