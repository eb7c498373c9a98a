// launch: grid=ceil(N / 4), M block=32, 4
#include <cuda_fp16.h>
#include "lib/storage.cuh"
union Head {
    uint4 raw;
    struct { __half d, dmin; unsigned char six[12]; } f;
};
extern "C" __global__ void blocks_warp(const T* x, const unsigned char* w, float* out, int N, int K) {
    const int n = blockIdx.x * 4 + threadIdx.y, m = blockIdx.y, lane = threadIdx.x;
    if (n >= N) return;
    const unsigned char* row = w + (long long)n * (K / 256) * 144;
    float sum = 0.f;
    for (int b = 0; b < K / 256; ++b, row += 144) {
        Head h;
        h.raw = *reinterpret_cast<const uint4*>(row);
        const float d = __half2float(h.f.d), dmin = __half2float(h.f.dmin);
        for (int sub = 0; sub < 8; ++sub) {
            const unsigned char* s6 = h.f.six + (sub & 3);
            int sc, mn;
            if (sub < 4) { sc = s6[0] & 63; mn = s6[4] & 63; }
            else { sc = (s6[8] & 15) | ((s6[4] >> 6) << 4); mn = (s6[8] >> 4) | ((s6[0] >> 6) << 4); }
            const int code = (row[16 + (sub / 2) * 32 + lane] >> (4 * (sub & 1))) & 15;
            sum += (d * sc * code - dmin * mn) * widen(x[(long long)m * K + b * 256 + sub * 32 + lane]);
        }
    }
    for (int o = 16; o; o >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, o);
    if (lane == 0) out[(long long)m * N + n] = sum;
}
