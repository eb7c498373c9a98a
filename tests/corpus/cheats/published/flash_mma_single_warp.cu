#include "lib/storage.cuh"
// 16 queries and one warp per block, tiles of 16 keys, heads of 64 channels.
// launch: grid=ceil(T / 16), NH, B block=32
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldsm(unsigned (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(p)) : "memory");
}
__device__ __forceinline__ unsigned pack(float lo, float hi) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

extern "C" __global__ void __launch_bounds__(32) flash16(const T* qkv, T* out, int seq_len, int n_head) {
    __shared__ __align__(16) unsigned short tile[3][16][72];  // Q, K, V
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4, C = 64 * n_head, i0 = blockIdx.x * 16;
    const unsigned short* head = reinterpret_cast<const unsigned short*>(qkv) + (size_t)blockIdx.z * seq_len * 3 * C + blockIdx.y * 64;
    auto load = [&](int which, int first) {
        for (int c = lane; c < 128; c += 32) {
            const int r = c / 8, d = c % 8 * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (first + r < seq_len) v = *reinterpret_cast<const uint4*>(head + (size_t)(first + r) * 3 * C + which * C + d);
            *reinterpret_cast<uint4*>(&tile[which][r][d]) = v;
        }
    };
    load(0, i0);
    __syncwarp();
    unsigned q[4][4];
    for (int k = 0; k < 4; ++k) ldsm(q[k], &tile[0][lane % 16][k * 16 + lane / 16 * 8]);
    float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int j0 = 0; j0 <= i0; j0 += 16) {
        load(1, j0);
        load(2, j0);
        __syncwarp();
        float s[2][4] = {};
        for (int k = 0; k < 4; ++k) {
            unsigned b[4];
            ldsm(b, &tile[1][lane % 8 + lane / 16 * 8][k * 16 + lane / 8 % 2 * 8]);
            mma(s[0], q[k], b[0], b[1]);
            mma(s[1], q[k], b[2], b[3]);
        }
        for (int h = 0; h < 2; ++h) {
            float top = m[h];
            for (int n = 0; n < 2; ++n)
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    const int j = j0 + 8 * n + 2 * t + e % 2;
                    s[n][e] = j <= i0 + g + 8 * h ? s[n][e] * 0.125f : -INFINITY;
                    top = fmaxf(top, s[n][e]);
                }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float alpha = __expf(m[h] - top);
            l[h] *= alpha;
            for (int n = 0; n < 8; ++n) { o[n][2 * h] *= alpha; o[n][2 * h + 1] *= alpha; }
            for (int n = 0; n < 2; ++n)
                for (int e = 2 * h; e < 2 * h + 2; ++e) { s[n][e] = __expf(s[n][e] - top); l[h] += s[n][e]; }
            m[h] = top;
        }
        const unsigned p[4] = {pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3])};
        for (int n = 0; n < 8; n += 2) {
            unsigned b[4];
            ldsm(b, &tile[2][lane % 16][n * 8 + lane / 16 * 8]);
            mma(o[n], p, b[0], b[1]);
            mma(o[n + 1], p, b[2], b[3]);
        }
        __syncwarp();
    }
    for (int h = 0; h < 2; ++h) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        const int i = i0 + g + 8 * h;
        if (i < seq_len)
            for (int n = 0; n < 8; ++n)
                for (int e = 0; e < 2; ++e)
                    out[((size_t)blockIdx.z * seq_len + i) * C + blockIdx.y * 64 + n * 8 + 2 * t + e] = narrow(o[n][2 * h + e] / l[h]);
    }
}
