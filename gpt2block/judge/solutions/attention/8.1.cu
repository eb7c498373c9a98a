// Chapter 8, exercise 1: attention, one block for each query and head, with its row of scores in shared memory
//
// Each score is computed once, by one thread, and never leaves the multiprocessor. Then the
// block computes exp of the scores and their sum. At last one thread for each channel of the
// head computes the weighted sum of the values.
//   gpt2block kernels attention --mine my.cu
//
// launch: grid=T, NH, B block=128 shared=4 * T
#include "lib/common.cuh"  // block_reduce_max and block_reduce_sum: the tree of chapter 2

#define THREADS 128

extern "C" __global__ void my_attention(
    const float* qkv,  // (B, T, 3C): rows [Q | K | V]; each part has the channels of head 0, head 1, ...
    float* out,        // (B, T, C)
    int T, int n_head, int HS) {
    extern __shared__ float weights[];  // (T): the first i + 1 are used
    __shared__ float scratch[THREADS];
    const int i = blockIdx.x, C = n_head * HS;
    const long long first_row = (long long)blockIdx.z * T;
    const float* q = qkv + (first_row + i) * 3 * C + blockIdx.y * HS;
    const float* k = qkv + first_row * 3 * C + C + blockIdx.y * HS;  // key 0; key j is at k + j * 3C
    const float* v = k + C;

    float largest = -INFINITY;
    for (int j = threadIdx.x; j <= i; j += THREADS) {
        float score = 0.0f;
        for (int d = 0; d < HS; ++d) score += q[d] * k[j * 3LL * C + d];
        weights[j] = score / sqrtf((float)HS);
        largest = fmaxf(largest, weights[j]);
    }
    largest = block_reduce_max<THREADS>(largest, scratch);

    float sum = 0.0f;
    for (int j = threadIdx.x; j <= i; j += THREADS) {
        weights[j] = expf(weights[j] - largest);
        sum += weights[j];
    }
    sum = block_reduce_sum<THREADS>(sum, scratch);  // after its barriers all threads see all weights

    for (int d = threadIdx.x; d < HS; d += THREADS) {
        float o = 0.0f;
        for (int j = 0; j <= i; ++j) o += weights[j] * v[j * 3LL * C + d];
        out[(first_row + i) * C + blockIdx.y * HS + d] = o / sum;
    }
}
