// Chapter 3, exercise 1: LayerNorm, one block per row, 16 bytes for each load
//
// Rows whose length is a multiple of 4 begin at a multiple of 16 bytes and are read as
// float4. Other rows use a loop that reads single values. Both loops compute the same sums, so
// that the code after them is shared.
//   gpt2block kernels layernorm --mine my.cu
//   gpt2block kernels layernorm --mine my.cu --shape C=2048
//
// launch: grid=N block=256
#include "lib/common.cuh"  // block_reduce_sum: the tree of chapter 2

#define THREADS 256

__device__ float sum_of(float4 v) { return v.x + v.y + v.z + v.w; }

__device__ float squares_of(float4 v, float mean) {
    const float x = v.x - mean, y = v.y - mean, z = v.z - mean, w = v.w - mean;
    return x * x + y * y + z * z + w * w;
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
    const float4* x4 = reinterpret_cast<const float4*>(x_row);
    const bool wide = C % 4 == 0;
    const int n4 = C / 4;  // float4 per row

    float sum = 0.0f;
    if (wide) {
        for (int i = threadIdx.x; i < n4; i += THREADS) sum += sum_of(x4[i]);
    } else {
        for (int c = threadIdx.x; c < C; c += THREADS) sum += x_row[c];
    }
    const float mean = block_reduce_sum<THREADS>(sum, partial) / C;

    float squares = 0.0f;
    if (wide) {
        for (int i = threadIdx.x; i < n4; i += THREADS) squares += squares_of(x4[i], mean);
    } else {
        for (int c = threadIdx.x; c < C; c += THREADS) squares += (x_row[c] - mean) * (x_row[c] - mean);
    }
    const float rstd = rsqrtf(block_reduce_sum<THREADS>(squares, partial) / C + eps);

    if (wide) {
        const float4* gamma4 = reinterpret_cast<const float4*>(gamma);
        const float4* beta4 = reinterpret_cast<const float4*>(beta);
        float4* out4 = reinterpret_cast<float4*>(out_row);
        for (int i = threadIdx.x; i < n4; i += THREADS) {
            const float4 v = x4[i], g = gamma4[i], b = beta4[i];
            out4[i] = make_float4(
                (v.x - mean) * rstd * g.x + b.x, (v.y - mean) * rstd * g.y + b.y,
                (v.z - mean) * rstd * g.z + b.z, (v.w - mean) * rstd * g.w + b.w);
        }
    } else {
        for (int c = threadIdx.x; c < C; c += THREADS) {
            out_row[c] = (x_row[c] - mean) * rstd * gamma[c] + beta[c];
        }
    }
}
