#include "lib/storage.cuh"
// launch: grid=ceil(N / 4), M block=128
__device__ __forceinline__ float half_at(const unsigned char* p) {
    const unsigned short bits = *reinterpret_cast<const unsigned short*>(p);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
__device__ __forceinline__ unsigned byte_of(unsigned v, int b) {
    unsigned d;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(v), "r"(0x4440u | b));
    return d;
}

extern "C" __global__ void __launch_bounds__(128) q4k_matvec(const T* __restrict__ x, const unsigned char* __restrict__ w,
                                                            float* __restrict__ out, int N, int K) {
    const int lane = threadIdx.x & 31, n = blockIdx.x * 4 + (threadIdx.x >> 5), m = blockIdx.y;
    if (n >= N) return;
    const int sub = lane >> 2, j = sub & 3, blocks = K / 256;
    float total = 0.0f;
    for (int b = 0; b < blocks; ++b) {
        const unsigned char* block = w + ((size_t)n * blocks + b) * 144;
        const unsigned char* six = block + 4 + j;
        const int s = sub < 4 ? six[0] & 63 : (six[8] & 15) | (six[0] >> 6 << 4);
        const int o = sub < 4 ? six[4] & 63 : (six[8] >> 4) | (six[4] >> 6 << 4);
        const uint2 raw = *reinterpret_cast<const uint2*>(block + 16 + (sub >> 1) * 32 + (lane & 3) * 8);
        const int shift = (sub & 1) * 4;
        const unsigned lo = raw.x >> shift & 0x0f0f0f0fu, hi = raw.y >> shift & 0x0f0f0f0fu;
        const T* v = x + (size_t)m * K + b * 256 + lane * 8;
        float dot = 0.0f, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float value = widen(v[e]);
            dot = fmaf(value, (float)byte_of(e < 4 ? lo : hi, e & 3), dot);
            sum += value;
        }
        total += half_at(block) * s * dot - half_at(block + 2) * o * sum;
    }
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
    if (lane == 0) out[(size_t)m * N + n] = total;
}
