// launch: grid=ceil(M / 4), ceil(N / 32) block=32, 4
#include "lib/storage.cuh"
#define STEP sum = fmaf(widen(*p++), widen(*q++), sum)
extern "C" __global__ void gemm_duff(const T* a, const T* w, T* out, int M, int N, int K) {
    const int m = blockIdx.x * 4 + threadIdx.y, n = blockIdx.y * 32 + threadIdx.x;
    if (m >= M || n >= N) return;
    const T* p = a + (long long)m * K;
    const T* q = w + (long long)n * K;
    float sum = 0.f;
    int rounds = (K + 7) / 8;
    switch (K & 7) {
        case 0: do { STEP;
        case 7:      STEP;
        case 6:      STEP;
        case 5:      STEP;
        case 4:      STEP;
        case 3:      STEP;
        case 2:      STEP;
        case 1:      STEP;
                } while (--rounds > 0);
    }
    out[(long long)m * N + n] = narrow(sum);
}
