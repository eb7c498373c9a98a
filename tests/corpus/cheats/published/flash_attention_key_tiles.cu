#include "lib/storage.cuh"
// A warp per query; a tile of 32 keys, one key per lane for the scores, two channels per lane for the output.
// launch: grid=T, NH, B block=32
extern "C" __global__ void __launch_bounds__(32) flash_tiles(const T* qkv, T* out, int seq_len, int n_head) {
    __shared__ float q[64], p[32];
    const int i = blockIdx.x, lane = threadIdx.x, C = 64 * n_head;
    const T* head = qkv + (size_t)blockIdx.z * seq_len * 3 * C + blockIdx.y * 64;
    q[lane] = widen(head[(size_t)i * 3 * C + lane]) * 0.125f;
    q[lane + 32] = widen(head[(size_t)i * 3 * C + lane + 32]) * 0.125f;
    __syncwarp();
    float m = -INFINITY, l = 0.f, o[2] = {0.f, 0.f};
    for (int j0 = 0; j0 <= i; j0 += 32) {
        const int j = j0 + lane;
        float s = -INFINITY;
        if (j <= i) {
            s = 0.f;
            const T* k = head + (size_t)j * 3 * C + C;
            for (int d = 0; d < 64; ++d) s = fmaf(q[d], widen(k[d]), s);
        }
        float top = s;
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float m_new = fmaxf(m, top), alpha = __expf(m - m_new), e = __expf(s - m_new);
        float sum = e;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        l = l * alpha + sum;
        m = m_new;
        p[lane] = e;
        __syncwarp();
        for (int k = 0; k < 32 && j0 + k <= i; ++k) {
            const T* v = head + (size_t)(j0 + k) * 3 * C + 2 * C;
            o[0] += p[k] * widen(v[lane]);
            o[1] += p[k] * widen(v[lane + 32]);
        }
        __syncwarp();
    }
    T* to = out + ((size_t)blockIdx.z * seq_len + i) * C + blockIdx.y * 64;
    to[lane] = narrow(o[0] / l);
    to[lane + 32] = narrow(o[1] / l);
}
