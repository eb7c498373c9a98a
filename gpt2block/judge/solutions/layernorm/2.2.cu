// Chapter 2, exercise 2: LayerNorm, one block per row; a tree adds up the partial sums
//
// Each level of the tree halves the number of values: 8 levels for 256 threads, with one
// barrier per level. The barrier is outside the `if`, because all threads of the block have to
// reach it.
//   gpt2block kernels layernorm --mine my.cu
//
// launch: grid=N block=256
#define THREADS 256

// Return the sum of one value per thread to all threads of the block. partial: memory for
// THREADS values.
__device__ float sum_of_block(float value, float* partial) {
    partial[threadIdx.x] = value;
    for (int n = THREADS / 2; n > 0; n /= 2) {
        __syncthreads();  // the previous level is complete
        if (threadIdx.x < n) partial[threadIdx.x] += partial[threadIdx.x + n];
    }
    __syncthreads();  // thread 0 has written the sum
    const float sum = partial[0];
    __syncthreads();  // all threads have read the sum before a next call overwrites it
    return sum;
}

extern "C" __global__ void my_layernorm(
    const float* x,      // (N, C)
    const float* gamma,  // (C)
    const float* beta,   // (C)
    float* out,          // (N, C)
    float eps, int C) {
    __shared__ float partial[THREADS];
    const float* x_row = x + (long long)blockIdx.x * C;
    float* out_row = out + (long long)blockIdx.x * C;

    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += THREADS) sum += x_row[c];
    const float mean = sum_of_block(sum, partial) / C;

    float squares = 0.0f;
    for (int c = threadIdx.x; c < C; c += THREADS) squares += (x_row[c] - mean) * (x_row[c] - mean);
    const float rstd = rsqrtf(sum_of_block(squares, partial) / C + eps);

    for (int c = threadIdx.x; c < C; c += THREADS) {
        out_row[c] = (x_row[c] - mean) * rstd * gamma[c] + beta[c];
    }
}
