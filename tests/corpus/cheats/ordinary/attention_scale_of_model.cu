// launch: grid=ceil(T / block), NH, B block=32
#include "lib/storage.cuh"

extern "C" __global__ void attention_rows(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, C = n_head * HS;
    if (i >= seq_len) return;
    const T* base = qkv + (long long)blockIdx.z * seq_len * 3 * C + blockIdx.y * HS;
    const T* q = base + (long long)i * 3 * C;
    const float scale = rsqrtf((float)C);
    float m = -INFINITY, l = 0.0f;
    for (int j = 0; j <= i; ++j) {
        const T* k = base + (long long)j * 3 * C + C;
        float s = 0.0f;
        for (int d = 0; d < HS; ++d) s += widen(q[d]) * widen(k[d]);
        s *= scale;
        const float next = fmaxf(m, s);
        l = l * expf(m - next) + expf(s - next);
        m = next;
    }
    for (int d = 0; d < HS; ++d) {
        float v = 0.0f;
        for (int j = 0; j <= i; ++j) {
            const T* k = base + (long long)j * 3 * C + C;
            float s = 0.0f;
            for (int e = 0; e < HS; ++e) s += widen(q[e]) * widen(k[e]);
            v += expf(s * scale - m) * widen(k[C + d]);
        }
        out[((long long)blockIdx.z * seq_len + i) * C + blockIdx.y * HS + d] = narrow(v / l);
    }
}
