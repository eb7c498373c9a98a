// launch: grid=T, NH, B block=128 shared=4 * T
#include "lib/storage.cuh"

extern "C" __global__ void attention_direct(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    extern __shared__ float p[];
    const int i = blockIdx.x, h = blockIdx.y, C = n_head * HS;
    const T* rows = qkv + (long long)blockIdx.z * seq_len * 3 * C + h * HS;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) {
        float s = 0.0f;
        for (int d = 0; d < HS; ++d) s += widen(rows[(long long)i * 3 * C + d]) * widen(rows[(long long)j * 3 * C + C + d]);
        p[j] = s / sqrtf((float)HS);
    }
    float m = p[0];
    for (int j = 1; j <= i; ++j) m = fmaxf(m, p[j]);
    float total = 0.0f;
    for (int j = 0; j <= i; ++j) total += expf(p[j] - m);
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        float v = 0.0f;
        for (int j = 0; j <= i; ++j) v += expf(p[j] - m) * widen(rows[(long long)j * 3 * C + 2 * C + d]);
        out[((long long)blockIdx.z * seq_len + i) * C + h * HS + d] = narrow(v / total);
    }
}
