// Matrix product with weights in blocks of 4 bits, Q4_K of a GGUF file: out = x W^T
//
// One thread per element of out: correct but slow, because each thread unpacks all weights of a row,
// and neighbouring threads read addresses a row apart.
//   gpt2block kernels blocks_matmul --mine my.cu
//
// The launch line may use M, N, K, B = K / 256 and block. T of `const T*` is float; with --dtype
// float16 it is that type, see kernels_cu/lib/storage.cuh for widen (to float).
// launch: grid=ceil(N / block), M block=64
#include <cuda_fp16.h>
#include "lib/storage.cuh"

struct Block {  // 256 weights of a row, aligned to 16 bytes
    __half d, dmin;
    unsigned char six[12];     // s and m of 8 sub-blocks of 32 weights, 6 bits each
    unsigned char codes[128];  // 32 bytes for 2 sub-blocks: codes in the lower and the upper 4 bits
};

__device__ float weight(const Block& block, int i) {
    const int sub = i / 32, q = block.codes[sub / 2 * 32 + i % 32] >> sub % 2 * 4 & 15;
    const unsigned char* six = block.six + sub % 4;
    const int s = sub < 4 ? six[0] & 63 : (six[8] & 15) | six[0] >> 6 << 4;
    const int m = sub < 4 ? six[4] & 63 : six[8] >> 4 | six[4] >> 6 << 4;
    return __half2float(block.d) * s * q - __half2float(block.dmin) * m;
}

extern "C" __global__ void my_blocks_matmul(
    const T* x,              // (M, K)
    const unsigned char* w,  // (N, K / 256, 144)
    float* out,              // (M, N)
    int N, int K) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const Block* row = reinterpret_cast<const Block*>(w) + (long long)n * (K / 256);
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += weight(row[k / 256], k % 256) * widen(x[(long long)m * K + k]);
    out[(long long)m * N + n] = sum;
}
