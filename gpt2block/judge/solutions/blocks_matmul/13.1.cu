// Chapter 13, exercise 1: blocks_matmul, few rows; every code is unpacked once for up to 4 rows of x
//
// A warp computes one output of each row. Eight lanes unpack a block together; each of them reads 16
// bytes of codes: 16 weights of each of two sub-blocks.
//   gpt2block kernels blocks_matmul --mine my.cu
//   gpt2block kernels blocks_matmul --mine my.cu --dtype float16
//
// launch: grid=ceil(32 * N / block), ceil(M / 4) block=128
#include <cuda_fp16.h>
#include "lib/storage.cuh"
#define ROWS 4

struct Block {
    __half d, dmin;
    unsigned char six[12];
    uint4 codes[8];
};

extern "C" __global__ void my_blocks_matmul(
    const T* x,              // (M, K)
    const unsigned char* w,  // (N, K / 256, 144)
    float* out,              // (M, N)
    int M, int N, int K) {
    const int n = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (n >= N) return;  // the same for all lanes of a warp, so that shuffles remain valid
    const int first = blockIdx.y * ROWS, pair = lane % 8 / 2, half = lane % 2;
    const Block* blocks = reinterpret_cast<const Block*>(w) + (long long)n * (K / 256);
    const T* x_rows[ROWS];  // places beyond the last row repeat it; their sums are not stored
    for (int r = 0; r < ROWS; ++r) {
        x_rows[r] = x + (long long)min(first + r, M - 1) * K + 64 * pair + 16 * half;
    }

    float sum[ROWS] = {};
    for (int k = lane / 8 * 256; k < K; k += 4 * 256) {
        const Block& block = blocks[k / 256];
        const uint4 codes = block.codes[lane % 8];
        const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
        for (int j = 0; j < 2; ++j) {
            const int i = 2 * pair + j;
            const unsigned char* six = block.six + i % 4;
            const int s = i < 4 ? six[0] & 63 : (six[8] & 15) | six[0] >> 6 << 4;
            const int m = i < 4 ? six[4] & 63 : six[8] >> 4 | six[4] >> 6 << 4;
            const float scale = __half2float(block.d) * s, least = __half2float(block.dmin) * m;
            float of_codes[ROWS] = {}, of_x[ROWS] = {};
            for (int four = 0; four < 4; ++four) {
                float q[4];
                for (int e = 0; e < 4; ++e) q[e] = words[four] >> (8 * e + 4 * j) & 15;
                for (int r = 0; r < ROWS; ++r) {
                    float v[4];
                    Vec<T, 4>::load(x_rows[r] + k + 32 * j + 4 * four).unpack(v);
                    for (int e = 0; e < 4; ++e) of_codes[r] += q[e] * v[e], of_x[r] += v[e];
                }
            }
            for (int r = 0; r < ROWS; ++r) sum[r] += scale * of_codes[r] - least * of_x[r];
        }
    }

    for (int r = 0; r < ROWS; ++r) {
        for (int distance = 16; distance > 0; distance /= 2) {
            sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], distance);
        }
        if (lane == 0 && first + r < M) out[(long long)(first + r) * N + n] = sum[r];
    }
}
