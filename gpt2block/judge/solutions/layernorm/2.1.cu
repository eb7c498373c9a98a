// Chapter 2, exercise 1: LayerNorm, one block per row; thread 0 adds up the partial sums
//
// There is a barrier before a thread reads a value that another thread has written, and before
// it overwrites a value that another thread may still read.
//   gpt2block kernels layernorm --mine my.cu
//
// launch: grid=N block=256
#define THREADS 256

// Return the sum of one value per thread to all threads of the block. partial: memory for
// THREADS values.
__device__ float sum_of_block(float value, float* partial) {
    partial[threadIdx.x] = value;
    __syncthreads();  // all partial sums are written before thread 0 reads them
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < THREADS; ++i) sum += partial[i];
        partial[0] = sum;
    }
    __syncthreads();  // the sum is written before the other threads read it
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
