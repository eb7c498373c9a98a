// Chapter 1, exercise 2: LayerNorm, one thread per row, mean and variance in one pass
//
// Welford's algorithm (1962): after c + 1 values, mean is their mean, and squares is the sum of
// their squared differences from it. Both change with every value by products of differences,
// which are small even if the mean is large, so that nothing cancels.
//   gpt2block kernels layernorm --mine my.cu
//
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

    float mean = 0.0f, squares = 0.0f;
    for (int c = 0; c < C; ++c) {
        const float d = x_row[c] - mean;  // difference from the mean of the values before
        mean += d / (c + 1);
        squares += d * (x_row[c] - mean);
    }
    const float rstd = rsqrtf(squares / C + eps);

    for (int c = 0; c < C; ++c) out_row[c] = (x_row[c] - mean) * rstd * gamma[c] + beta[c];
}
