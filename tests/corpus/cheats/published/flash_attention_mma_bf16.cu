#include "lib/storage.cuh"
// 64 queries per block, 16 per warp; tiles of 64 keys; heads of 64 channels.
// launch: grid=ceil(T / 64), NH, B block=128
#define P 72
__device__ __forceinline__ void mma_bf16(float* d, const unsigned* a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

extern "C" __global__ void __launch_bounds__(128) flash_bf16(const T* qkv, T* out, int seq_len, int n_head) {
    __shared__ __align__(16) unsigned short ks[64 * P], vs[64 * P];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, C = n_head * 64;
    const unsigned short* base = reinterpret_cast<const unsigned short*>(qkv) + blockIdx.z * (size_t)seq_len * 3 * C + blockIdx.y * 64;
    const int q0 = blockIdx.x * 64 + warp * 16 + g, q1 = q0 + 8;
    unsigned fq[4][4];
    for (int k = 0; k < 4; ++k)
        for (int e = 0; e < 4; ++e) {
            const int row = min(e & 1 ? q1 : q0, seq_len - 1);
            fq[k][e] = *reinterpret_cast<const unsigned*>(base + (size_t)row * 3 * C + k * 16 + 2 * t + (e >> 1) * 8);
        }
    float o[8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};
    for (int j0 = 0; j0 <= blockIdx.x * 64; j0 += 64) {
        for (int c = threadIdx.x; c < 64 * 8; c += 128) {
            const int j = c / 8, d = c % 8 * 8;
            uint4 kv = make_uint4(0, 0, 0, 0), vv = kv;
            if (j0 + j < seq_len) {
                const unsigned short* row = base + (size_t)(j0 + j) * 3 * C + d;
                kv = *reinterpret_cast<const uint4*>(row + C);
                vv = *reinterpret_cast<const uint4*>(row + 2 * C);
            }
            *reinterpret_cast<uint4*>(ks + j * P + d) = kv;
            *reinterpret_cast<uint4*>(vs + j * P + d) = vv;
        }
        __syncthreads();
        float s[8][4] = {};
        for (int n = 0; n < 8; n += 2)
            for (int k = 0; k < 4; ++k) {
                unsigned f[4];
                const unsigned at = (unsigned)__cvta_generic_to_shared(ks + (n * 8 + lane % 8 + lane / 16 * 8) * P + k * 16 + lane / 8 % 2 * 8);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
                mma_bf16(s[n], fq[k], f[0], f[1]);
                mma_bf16(s[n + 1], fq[k], f[2], f[3]);
            }
        float top[2] = {m[0], m[1]};
        for (int n = 0; n < 8; ++n)
            for (int e = 0; e < 4; ++e) {
                const int j = j0 + n * 8 + 2 * t + (e & 1), i = e < 2 ? q0 : q1;
                s[n][e] = j <= i ? s[n][e] * (0.125f * 1.4426950409f) : -INFINITY;
                top[e / 2] = fmaxf(top[e / 2], s[n][e]);
            }
        for (int h = 0; h < 2; ++h) {
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
            const float alpha = exp2f(m[h] - top[h]);
            l[h] *= alpha;
            for (int n = 0; n < 8; ++n) { o[n][2 * h] *= alpha; o[n][2 * h + 1] *= alpha; }
            m[h] = top[h];
        }
        for (int n = 0; n < 8; ++n)
            for (int e = 0; e < 4; ++e) { s[n][e] = exp2f(s[n][e] - m[e / 2]); l[e / 2] += s[n][e]; }
        for (int k = 0; k < 4; ++k) {
            const unsigned fp[4] = {pack2(s[2 * k][0], s[2 * k][1]), pack2(s[2 * k][2], s[2 * k][3]),
                                    pack2(s[2 * k + 1][0], s[2 * k + 1][1]), pack2(s[2 * k + 1][2], s[2 * k + 1][3])};
            for (int n = 0; n < 8; n += 2) {
                unsigned f[4];
                const unsigned at = (unsigned)__cvta_generic_to_shared(vs + (k * 16 + lane % 16) * P + n * 8 + lane / 16 * 8);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(at) : "memory");
                mma_bf16(o[n], fp, f[0], f[1]);
                mma_bf16(o[n + 1], fp, f[2], f[3]);
            }
        }
        __syncthreads();
    }
    for (int h = 0; h < 2; ++h) {
        l[h] += __shfl_xor_sync(~0u, l[h], 1);
        l[h] += __shfl_xor_sync(~0u, l[h], 2);
        const int i = h ? q1 : q0;
        if (i >= seq_len) continue;
        T* to = out + (blockIdx.z * (size_t)seq_len + i) * C + blockIdx.y * 64;
        for (int n = 0; n < 8; ++n)
            for (int e = 0; e < 2; ++e) to[n * 8 + 2 * t + e] = narrow(o[n][2 * h + e] / l[h]);
    }
}
