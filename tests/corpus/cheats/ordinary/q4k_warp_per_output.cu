// launch: grid=ceil(N / 4), M block=32, 4
#include <cuda_fp16.h>
#include "lib/storage.cuh"

extern "C" __global__ void q4k_warp(const T* x, const unsigned char* w, float* out, int N, int K) {
    const int n = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x, m = blockIdx.y;
    if (n >= N) return;
    const int blocks = K / 256, sub = lane / 4, first = lane % 4 * 8;  // 8 weights of sub-block `sub`
    float sum = 0.0f;
    for (int b = 0; b < blocks; ++b) {
        const unsigned char* p = w + ((long long)n * blocks + b) * 144;
        const float d = __half2float(reinterpret_cast<const __half*>(p)[0]);
        const float dmin = __half2float(reinterpret_cast<const __half*>(p)[1]);
        const unsigned char* six = p + 4;
        int scale, offset;
        if (sub < 4) {
            scale = six[sub] & 63;
            offset = six[sub + 4] & 63;
        } else {
            scale = (six[sub + 4] & 0xF) | ((six[sub - 4] >> 6) << 4);
            offset = (six[sub + 4] >> 4) | ((six[sub] >> 6) << 4);
        }
        const unsigned char* codes = p + 16 + sub / 2 * 32 + first;
        const T* xs = x + (long long)m * K + b * 256 + sub * 32 + first;
        for (int e = 0; e < 8; ++e) {
            const int q = sub % 2 ? codes[e] >> 4 : codes[e] & 0xF;
            sum += (d * scale * q - dmin * offset) * widen(xs[e]);
        }
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) out[(long long)m * N + n] = sum;
}
