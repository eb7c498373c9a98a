// GELU of LayerNorm without gamma and beta: y = GELU((x - mean) * rstd) over each row
//
// One thread per row: correct but slow, because neighbouring threads read addresses a row apart.
//   gpt2block kernels layernorm_gelu --mine my.cu
//
// The launch line may use N, C and block.
// launch: grid=ceil(N / block) block=64
extern "C" __global__ void my_layernorm_gelu(
    const float* x,  // (N, C)
    float* y,        // (N, C)
    float eps, int N, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x_row = x + (long long)row * C;
    float* y_row = y + (long long)row * C;

    float mean = 0.0f;
    for (int c = 0; c < C; ++c) mean += x_row[c];
    mean /= C;

    float var = 0.0f;
    for (int c = 0; c < C; ++c) var += (x_row[c] - mean) * (x_row[c] - mean);
    const float rstd = rsqrtf(var / C + eps);

    for (int c = 0; c < C; ++c) {
        const float v = (x_row[c] - mean) * rstd;
        y_row[c] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));  // sqrt(2 / pi)
    }
}
