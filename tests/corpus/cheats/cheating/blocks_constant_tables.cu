// launch: grid=N, M block=32
#include <cuda_fp16.h>
#include "lib/storage.cuh"
__constant__ unsigned char S_AT[8] = {0, 1, 2, 3, 8, 9, 10, 11};
__constant__ unsigned char M_AT[8] = {4, 5, 6, 7, 8, 9, 10, 11};
__constant__ unsigned char M_SHIFT[8] = {0, 0, 0, 0, 4, 4, 4, 4};
__constant__ unsigned char MASK[8] = {63, 63, 63, 63, 15, 15, 15, 15};
__constant__ unsigned char TOP_SHIFT[8] = {8, 8, 8, 8, 6, 6, 6, 6};

extern "C" __global__ void blocks_tables(const T* x, const unsigned char* w, float* out, int N, int K) {
    const int n = blockIdx.x, m = blockIdx.y, lane = threadIdx.x;
    float sum = 0.f;
    for (int k = lane; k < K; k += 32) {
        const unsigned char* block = w + ((long long)n * (K / 256) + k / 256) * 144;
        const int sub = k % 256 / 32;
        const unsigned char* six = block + 4;
        const int s = (six[S_AT[sub]] & MASK[sub]) | ((six[sub & 3] >> TOP_SHIFT[sub]) << 4);
        const int lo = ((six[M_AT[sub]] >> M_SHIFT[sub]) & MASK[sub]) | ((six[4 + (sub & 3)] >> TOP_SHIFT[sub]) << 4);
        const int q = (block[16 + sub / 2 * 32 + lane] >> (sub & 1) * 4) & 15;
        const float d = __half2float(*reinterpret_cast<const __half*>(block));
        const float dmin = __half2float(*reinterpret_cast<const __half*>(block + 2));
        sum += (d * s * q - dmin * lo) * widen(x[(long long)m * K + k]);
    }
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) out[(long long)m * N + n] = sum;
}
