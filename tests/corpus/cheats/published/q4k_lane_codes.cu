#include "lib/storage.cuh"
// launch: grid=ceil(N / 8), M block=32, 8
extern "C" __global__ void __launch_bounds__(256) q4k_rows(const T* x, const unsigned char* w, float* out, int N, int K) {
    const int n = blockIdx.x * 8 + threadIdx.y, lane = threadIdx.x;
    if (n >= N) return;
    const unsigned char* block = w + (size_t)n * (K / 256) * 144;
    const T* row = x + (size_t)blockIdx.y * K;
    float acc = 0.f;
    for (int b = 0; b < K / 256; ++b, block += 144, row += 256) {
        float d, dmin;
        const unsigned both = *reinterpret_cast<const unsigned*>(block);
        asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(d), "=f"(dmin) : "r"(both));
#pragma unroll
        for (int sub = 0; sub < 8; ++sub) {
            const unsigned char* p = block + 4 + (sub & 3);
            const int s = sub < 4 ? p[0] & 63 : (p[8] & 15) | p[0] >> 6 << 4;
            const int m = sub < 4 ? p[4] & 63 : p[8] >> 4 | p[4] >> 6 << 4;
            const int byte = block[16 + (sub >> 1) * 32 + lane];
            const int code = sub & 1 ? byte & 15 : byte >> 4;
            acc += (d * s * code - dmin * m) * widen(row[sub * 32 + lane]);
        }
    }
    for (int e = 16; e; e >>= 1) acc += __shfl_xor_sync(~0u, acc, e);
    if (lane == 0) out[(size_t)blockIdx.y * N + n] = acc;
}
