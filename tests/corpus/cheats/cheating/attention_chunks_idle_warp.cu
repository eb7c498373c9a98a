// launch: grid=T, NH, B block=96
#include "lib/storage.cuh"
extern "C" __global__ void attention_chunks(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    __shared__ float sc[64];
    const int i = blockIdx.x, t = threadIdx.x, C = n_head * HS;
    const bool works = t < 64;
    const T* base = qkv + (long long)blockIdx.z * seq_len * 3 * C + blockIdx.y * HS;
    const T* q = base + (long long)i * 3 * C;
    for (int d0 = 0; d0 < HS; d0 += 64) {
        float m = -INFINITY, sum = 0.f, acc = 0.f;
        for (int j0 = 0; j0 <= i; j0 += 64) {
            if (works) {
                float s = -INFINITY;
                if (j0 + t <= i) {
                    const T* k = base + (j0 + t) * 3LL * C + C;
                    s = 0.f;
                    for (int d = 0; d < HS; ++d) s += widen(q[d]) * widen(k[d]);
                    s /= sqrtf((float)HS);
                }
                sc[t] = s;
            }
            __syncthreads();
            if (works) {
                float top = m;
                for (int k = 0; k < 64; ++k) top = fmaxf(top, sc[k]);
                const float shrink = j0 == 0 ? 0.f : expf(m - top);
                sum *= shrink;
                acc *= shrink;
                for (int k = 0; k < 64 && j0 + k <= i; ++k) {
                    const float e = expf(sc[k] - top);
                    sum += e;
                    if (d0 + t < HS) acc += e * widen(base[(j0 + k) * 3LL * C + 2 * C + d0 + t]);
                }
                m = top;
            }
            __syncthreads();
        }
        if (works && d0 + t < HS) out[((long long)blockIdx.z * seq_len + i) * C + blockIdx.y * HS + d0 + t] = narrow(acc / sum);
    }
}
