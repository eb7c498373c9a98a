// launch: grid=ceil(T / 4), NH, B block=32, 4
#include "lib/storage.cuh"
extern "C" __global__ void attention_online_warp(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    const int i = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x, C = n_head * HS;
    if (i >= seq_len) return;
    const T* base = qkv + (long long)blockIdx.z * seq_len * 3 * C + blockIdx.y * HS;
    const T* q = base + (long long)i * 3 * C;
    T* o = out + ((long long)blockIdx.z * seq_len + i) * C + blockIdx.y * HS;
    for (int d0 = 0; d0 < HS; d0 += 32) {
        float m = 0.f, sum = 0.f, acc = 0.f;
        for (int j = 0; j <= i; ++j) {
            const T* k = base + (long long)j * 3 * C + C;
            float dot = 0.f;
            for (int d = lane; d < HS; d += 32) dot += widen(q[d]) * widen(k[d]);
            for (int w = 16; w; w >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, w);
            dot /= sqrtf((float)HS);
            const float top = fmaxf(m, dot), shrink = expf(m - top), weight = expf(dot - top);
            sum = sum * shrink + weight;
            if (d0 + lane < HS) acc = acc * shrink + weight * widen(k[C + d0 + lane]);
            m = top;
        }
        if (d0 + lane < HS) o[d0 + lane] = narrow(acc / sum);
    }
}
