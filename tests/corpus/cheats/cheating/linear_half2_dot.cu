// launch: grid=ceil(N / block), M block=64
#include <cuda_fp16.h>
extern "C" __global__ void linear_h2(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    const int m = blockIdx.y, n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *p = x + (long long)m * K, *q = w + (long long)n * K;
    float sum = 0.f;
    int k = 0;
    for (; k + 8 <= K; k += 8) {
        __half2 acc = __floats2half2_rn(0.f, 0.f);
        for (int j = 0; j < 8; j += 2)
            acc = __hfma2(__floats2half2_rn(p[k + j], p[k + j + 1]), __floats2half2_rn(q[k + j], q[k + j + 1]), acc);
        sum += __low2float(acc) + __high2float(acc);
    }
    for (; k < K; ++k) sum += p[k] * q[k];
    out[(long long)m * N + n] = sum + bias[n];
}
