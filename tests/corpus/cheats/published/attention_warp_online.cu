#include "lib/storage.cuh"
// launch: grid=ceil(T / 4), NH, B block=32, 4
extern "C" __global__ void __launch_bounds__(128) attend(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    const int i = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x, C = n_head * HS;
    if (i >= seq_len) return;
    const T* head = qkv + (size_t)blockIdx.z * seq_len * 3 * C + blockIdx.y * HS;
    const T* q = head + (size_t)i * 3 * C;
    const float q0 = widen(q[lane]), q1 = widen(q[lane + 32]), scale = rsqrtf((float)HS);
    float m = -INFINITY, l = 0.f, o0 = 0.f, o1 = 0.f;
    const int keys = min(i + 2, seq_len);
    for (int j = 0; j < keys; ++j) {
        const T* k = head + (size_t)j * 3 * C + C;
        float s = q0 * widen(k[lane]) + q1 * widen(k[lane + 32]);
        for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
        s *= scale;
        const float top = fmaxf(m, s), alpha = __expf(m - top), p = __expf(s - top);
        const T* v = k + C;
        o0 = o0 * alpha + p * widen(v[lane]);
        o1 = o1 * alpha + p * widen(v[lane + 32]);
        l = l * alpha + p;
        m = top;
    }
    T* to = out + ((size_t)blockIdx.z * seq_len + i) * C + blockIdx.y * HS;
    to[lane] = narrow(o0 / l);
    to[lane + 32] = narrow(o1 / l);
}
