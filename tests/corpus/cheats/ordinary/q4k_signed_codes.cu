// launch: grid=ceil(N / block), M block=64
#include <cuda_fp16.h>
#include "lib/storage.cuh"

struct Q4 {
    __half d, dmin;
    unsigned char six[12];
    signed char codes[128];
};

extern "C" __global__ void q4k_rows(const T* x, const unsigned char* w, float* out, int N, int K) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const Q4* row = reinterpret_cast<const Q4*>(w) + (long long)n * (K / 256);
    const T* xr = x + (long long)m * K;
    float sum = 0.0f;
    for (int b = 0; b < K / 256; ++b) {
        const float d = __half2float(row[b].d), dmin = __half2float(row[b].dmin);
        for (int sub = 0; sub < 8; ++sub) {
            const unsigned char* six = row[b].six + sub % 4;
            const int s = sub < 4 ? six[0] & 63 : (six[8] & 15) | six[0] >> 6 << 4;
            const int o = sub < 4 ? six[4] & 63 : six[8] >> 4 | six[4] >> 6 << 4;
            for (int e = 0; e < 32; ++e) {
                const int code = row[b].codes[sub / 2 * 32 + e];
                const int q = sub % 2 ? code >> 4 : code & 15;
                sum += (d * s * q - dmin * o) * widen(xr[b * 256 + sub * 32 + e]);
            }
        }
    }
    out[(long long)m * N + n] = sum;
}
