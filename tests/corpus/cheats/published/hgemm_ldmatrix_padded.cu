#include "lib/storage.cuh"
// One warp per 16 x 32 strip, four warps: 64 x 32 of out; K in steps of 32.
// launch: grid=ceil(N / 32), ceil(M / 64) block=128
#define LD 40
__device__ __forceinline__ void ldsm_x4(unsigned (&r)[4], const unsigned short* p) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(128) hgemm(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(16) unsigned short sa[64 * LD], sw[32 * LD];
    const unsigned short* ga = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* gw = reinterpret_cast<const unsigned short*>(w);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 32;
    float acc[4][4] = {};

    for (int k0 = 0; k0 < K; k0 += 32) {
        for (int c = threadIdx.x; c < 64 * 4 + 32 * 4; c += 128) {
            const bool of_a = c < 256;
            const int i = of_a ? c : c - 256, r = i / 4, k = i % 4 * 8;
            const int row = (of_a ? m0 : n0) + r, rows = of_a ? M : N;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < rows && k0 + k < K) v = *reinterpret_cast<const uint4*>((of_a ? ga : gw) + (size_t)row * K + k0 + k);
            *reinterpret_cast<uint4*>((of_a ? sa : sw) + r * LD + k) = v;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; k += 16) {
            unsigned fa[4];
            ldsm_x4(fa, sa + (warp * 16 + lane % 16) * LD + k + lane / 16 * 8);
#pragma unroll
            for (int n = 0; n < 32; n += 16) {
                unsigned fb[4];
                ldsm_x4(fb, sw + (n + (lane & 7) + (lane >> 4) * 8) * LD + k + (lane >> 3 & 1) * 8);
                mma_f16(acc[n / 8], fa, fb[0], fb[1]);
                mma_f16(acc[n / 8 + 1], fa, fb[2], fb[3]);
            }
        }
        __syncthreads();
    }
    for (int j = 0; j < 4; ++j)
        for (int e = 0; e < 4; ++e) {
            const int m = m0 + warp * 16 + lane / 4 + e / 2 * 8, n = n0 + j * 8 + lane % 4 * 2 + e % 2;
            if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc[j][e]);
        }
}
