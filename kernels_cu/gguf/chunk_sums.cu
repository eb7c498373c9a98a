// Sums of x over chunks of 32 along K, for the minimums of GGUF blocks in products of decoding that read x as an
// operand (lib/decode/wgmma_gguf.cuh, lib/decode/mma_copied.cuh). Needed if the kernel that stored x has not stored
// these sums (lib/chunk_sums.cuh).
//
//   gguf_chunk_sums: one thread per chunk; sums of rows of x in the order of additions of lib/decode/mma.cuh
//
// grid (ceil(M K / 32 / threads)), block (any)
#define OPERAND_WIDTH 2
#define OPERAND_TERMS 1
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"

// Launched by operation (variant): linear (gguf sums)
extern "C" __global__ void gguf_chunk_sums(
    const float* x,  // (M, K): 16-bit terms in wgmma order, two in each float
    float* out,      // (M, K / 32): each element is a sum as two float16 numbers
    int M, int K) {
    let_next_start();
    wait_for_previous();
    const int chunks = K / 32, i = blockIdx.x * blockDim.x + threadIdx.x, m = i % M, chunk = i / M;
    if (chunk >= chunks) return;
    float four[8];
#pragma unroll
    for (int l = 0; l < 8; ++l) {
        const long long place = operand_place(m, chunk * 32 + 4 * l, M, K);
        four[l] = sum_of((unsigned)__float_as_int(__ldcg(x + place))) +
                  sum_of((unsigned)__float_as_int(__ldcg(x + place + 1)));
    }
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {  // the order of additions of lanes_sum<8>
#pragma unroll
        for (int l = 0; l < distance; ++l) four[l] += four[l + distance];
    }
    store_sum(out, four[0], m, 32 * chunk, M, K);
}
