// LayerNorm: out = (x - mean) * rstd * gamma + beta over each row, rstd = 1 / sqrt(var + eps)
//
// One thread per row: correct but slow, because neighbouring threads read addresses a row apart.
//   gpt2block kernels layernorm --mine my.cu
//
// The launch line gives the number of blocks, of threads per block and, with shared=, the bytes of
// extern __shared__ memory. It may use N, C, B, T (N = B * T rows) and block. Two more outputs can be
// parameters: float* mean and float* rstd, (N).
// launch: grid=ceil(N / block) block=64
extern "C" __global__ void my_layernorm(
    const float* x,      // (N, C)
    const float* gamma,  // (C)
    const float* beta,   // (C)
    float* out,          // (N, C)
    float eps, int N, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x_row = x + (long long)row * C;
    float* out_row = out + (long long)row * C;

    float mean = 0.0f;
    for (int c = 0; c < C; ++c) mean += x_row[c];
    mean /= C;

    float var = 0.0f;
    for (int c = 0; c < C; ++c) var += (x_row[c] - mean) * (x_row[c] - mean);
    const float rstd = rsqrtf(var / C + eps);

    for (int c = 0; c < C; ++c) out_row[c] = (x_row[c] - mean) * rstd * gamma[c] + beta[c];
}
