// Chapter 10, exercise 1: LayerNorm and GELU in one kernel; one warp per row, GELU before the only store
//
// The normalized value is in a register when GELU needs it, so that it is neither written nor read.
//   gpt2block kernels layernorm_gelu --mine my.cu
//   gpt2block kernels layernorm_gelu --mine my.cu --shape N=9,C=1024
//
// launch: grid=ceil(N / 8) block=256
__device__ float gelu(float v) {
    return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));  // sqrt(2 / pi)
}

__device__ float sum_of_warp(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

extern "C" __global__ void my_layernorm_gelu(
    const float* x,  // (N, C)
    float* y,        // (N, C)
    float eps, int N, int C) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* x_row = x + (long long)row * C;
    float* y_row = y + (long long)row * C;

    float sum = 0.0f;
    for (int c = lane; c < C; c += 32) sum += x_row[c];
    const float mean = sum_of_warp(sum) / C;

    float squares = 0.0f;
    for (int c = lane; c < C; c += 32) squares += (x_row[c] - mean) * (x_row[c] - mean);
    const float rstd = rsqrtf(sum_of_warp(squares) / C + eps);

    for (int c = lane; c < C; c += 32) y_row[c] = gelu((x_row[c] - mean) * rstd);
}
