// launch: grid=T, NH, B block=64
#include "lib/storage.cuh"
__shared__ float scores[512];
extern "C" __global__ void attention_window(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    const int i = blockIdx.x, h = blockIdx.y, t = threadIdx.x, C = n_head * HS;
    const T* rows = qkv + (long long)blockIdx.z * seq_len * 3 * C + h * HS;
    const int from = i >= 512 ? i - 511 : 0, count = i - from + 1;
    for (int j = t; j < count; j += 64) {
        float dot = 0.f;
        for (int d = 0; d < HS; ++d)
            dot += widen(rows[(long long)i * 3 * C + d]) * widen(rows[(long long)(from + j) * 3 * C + C + d]);
        scores[j] = dot * rsqrtf((float)HS);
    }
    __syncthreads();
    float m = scores[0], sum = 0.f;
    for (int j = 1; j < count; ++j) m = fmaxf(m, scores[j]);
    for (int j = 0; j < count; ++j) sum += expf(scores[j] - m);
    for (int d = t; d < HS; d += 64) {
        float acc = 0.f;
        for (int j = 0; j < count; ++j) acc += expf(scores[j] - m) * widen(rows[(long long)(from + j) * 3 * C + 2 * C + d]);
        out[((long long)blockIdx.z * seq_len + i) * C + h * HS + d] = narrow(acc / sum);
    }
}
