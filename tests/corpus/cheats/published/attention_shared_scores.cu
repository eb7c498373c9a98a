#include "lib/storage.cuh"
// launch: grid=T, NH, B block=64 shared=4 * T
extern "C" __global__ void __launch_bounds__(64) attention_row(const T* __restrict__ qkv, T* __restrict__ out, int seq_len, int n_head, int HS) {
    extern __shared__ float score[];
    __shared__ float part[2];
    const int i = blockIdx.x, C = n_head * HS, tid = threadIdx.x;
    const float scale = rsqrtf((float)C);
    const T* head = qkv + (size_t)blockIdx.z * seq_len * 3 * C + blockIdx.y * HS;
    const T* q = head + (size_t)i * 3 * C;
    float m = -INFINITY;
    for (int j = tid; j <= i; j += 64) {
        const T* k = head + (size_t)j * 3 * C + C;
        float s = 0.f;
        for (int d = 0; d < HS; ++d) s += widen(q[d]) * widen(k[d]);
        score[j] = s * scale;
        m = fmaxf(m, score[j]);
    }
    for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    if (tid % 32 == 0) part[tid / 32] = m;
    __syncthreads();
    m = fmaxf(part[0], part[1]);
    for (int d = tid; d < HS; d += 64) {
        float sum = 0.f, o = 0.f;
        for (int j = 0; j <= i; ++j) {
            const float p = expf(score[j] - m);
            sum += p;
            o += p * widen(head[(size_t)j * 3 * C + 2 * C + d]);
        }
        out[((size_t)blockIdx.z * seq_len + i) * C + blockIdx.y * HS + d] = narrow(o / sum);
    }
}
