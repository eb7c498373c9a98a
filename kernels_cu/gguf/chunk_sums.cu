// What minimums of blocks of GGUF are multiplied by in decoding by wgmma (matmul/decode_hopper_gguf.cuh).
//
//   x (M, K), rounded terms of 16 bits in order -> out: of each 32 of K of a row, the sum as order::split_sum gives it
//
//   gguf_chunk_sums: sums of rows of x in the order of additions of matmul/decode_mma.cuh; a thread has one
//
// out has, for each TERM_ROWS rows and each 128 of K, four words of each row, as one copy brings them.
//
// grid (ceil(M K / 32 / threads)), block (any)
#ifndef WEIGHT_GGUF
#define WEIGHT_GGUF
#endif
#define TERM_WIDTH 2
#define TERM_COUNT 1
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "matmul/decode_order.cuh"

extern "C" __global__ void gguf_chunk_sums(
    const float* x,  // (M, K), terms in order: a pair has the place of a float
    float* out,      // (M, K / 32), each two numbers of float16
    int M, int K) {
    let_next_start();
    wait_for_previous();
    const int chunks = K / 32, i = blockIdx.x * blockDim.x + threadIdx.x, m = i % M, chunk = i / M;
    if (chunk >= chunks) return;
    float four[8];
#pragma unroll
    for (int l = 0; l < 8; ++l) {
        const long long place = term_place(m, chunk * 32 + 4 * l, M, K);
        float first[2], last[2];
        unpack2_fp16((unsigned)__float_as_int(__ldcg(x + place)), first);
        unpack2_fp16((unsigned)__float_as_int(__ldcg(x + place + 1)), last);
        four[l] = first[0] + first[1] + (last[0] + last[1]);
    }
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {  // as lanes_sum<8>
#pragma unroll
        for (int l = 0; l < distance; ++l) four[l] += four[l + distance];
    }
    const int first = m / (int)TERM_ROWS * (int)TERM_ROWS, rows = min((int)TERM_ROWS, M - first);
    const long long unit = (long long)first * (chunks / 4) + (long long)(chunk / 4) * rows + (m - first);
    out[unit * 4 + chunk % 4] = __int_as_float((int)order::split_sum(four[0]));
}
