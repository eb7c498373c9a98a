// Chapter 3, exercise 4: softmax, one block per row, which stays in registers
//
// The method is that of exercise 2, LayerNorm, with two differences: places beyond the row are
// -inf, of which exp is 0, and exp is computed once and kept in the registers of x.
//   gpt2block kernels softmax --mine my.cu
//   gpt2block kernels softmax --mine my.cu --shape T=128
//   gpt2block kernels softmax --mine my.cu --shape T=516
//
// launch: grid=rows block=128
#include "lib/common.cuh"  // block_reduce_max and block_reduce_sum: the tree of chapter 2

#define THREADS 128
#define HELD 4  // float4 per thread: for rows of up to 4 * HELD * THREADS = 2048 values

// x_row and y_row begin at multiples of 16 bytes; n is a multiple of 4 and at most 4 * HELD
// * THREADS.
__device__ void in_registers(const float* x_row, float* y_row, int n, float* partial) {
    float4 held[HELD];
    float largest = -INFINITY;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        held[k] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (i < n / 4) held[k] = reinterpret_cast<const float4*>(x_row)[i];
        largest = fmaxf(largest, fmaxf(fmaxf(held[k].x, held[k].y), fmaxf(held[k].z, held[k].w)));
    }
    largest = block_reduce_max<THREADS>(largest, partial);

    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        held[k] = make_float4(
            expf(held[k].x - largest), expf(held[k].y - largest), expf(held[k].z - largest),
            expf(held[k].w - largest));
        sum += held[k].x + held[k].y + held[k].z + held[k].w;
    }
    const float scale = 1.0f / block_reduce_sum<THREADS>(sum, partial);

#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        if (i >= n / 4) continue;
        reinterpret_cast<float4*>(y_row)[i] =
            make_float4(held[k].x * scale, held[k].y * scale, held[k].z * scale, held[k].w * scale);
    }
}

__device__ void from_memory(const float* x_row, float* y_row, int n, float* partial) {
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < n; i += THREADS) largest = fmaxf(largest, x_row[i]);
    largest = block_reduce_max<THREADS>(largest, partial);

    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += THREADS) sum += expf(x_row[i] - largest);
    const float scale = 1.0f / block_reduce_sum<THREADS>(sum, partial);

    for (int i = threadIdx.x; i < n; i += THREADS) y_row[i] = expf(x_row[i] - largest) * scale;
}

extern "C" __global__ void my_softmax(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int n) {
    __shared__ float partial[THREADS];
    const float* x_row = x + (long long)blockIdx.x * n;
    float* y_row = y + (long long)blockIdx.x * n;
    if (n % 4 == 0 && n <= 4 * HELD * THREADS) {
        in_registers(x_row, y_row, n, partial);
    } else {
        from_memory(x_row, y_row, n, partial);
    }
}
