#include "lib/storage.cuh"
// launch: grid=ceil(N / 64), ceil(M / 32) block=128
__device__ __forceinline__ int swz(int r, int c) { return r * 64 + ((c ^ (r & 7)) << 3); }

extern "C" __global__ void __launch_bounds__(128) hgemm_swizzled(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(128) unsigned short sa[32 * 64], sw[64 * 64];
    const unsigned short* ga = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* gw = reinterpret_cast<const unsigned short*>(w);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m0 = blockIdx.y * 32, n0 = blockIdx.x * 64;
    float acc[2][2][4] = {};
    for (int k0 = 0; k0 < K; k0 += 64) {
        for (int i = threadIdx.x; i < 96 * 8; i += 128) {
            const int c = i & 7, r = i >> 3;
            const bool first = r < 32, in = k0 + 8 * c < K && (first ? m0 + r < M : n0 + r - 32 < N);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (in) v = __ldg(reinterpret_cast<const uint4*>((first ? ga + (size_t)(m0 + r) * K : gw + (size_t)(n0 + r - 32) * K) + k0 + 8 * c));
            if (first) *reinterpret_cast<uint4*>(sa + swz(r, c)) = v;
            else *reinterpret_cast<uint4*>(sw + swz(r - 32, c)) = v;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unsigned b[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                         : "r"((unsigned)__cvta_generic_to_shared(sw + swz(warp * 16 + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)))) : "memory");
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned f[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                             : "r"((unsigned)__cvta_generic_to_shared(sa + (i * 16 + (lane & 15)) * 64 + (2 * k + (lane >> 4)) * 8)) : "memory");
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float* d = acc[i][j];
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "r"(b[2 * j]), "r"(b[2 * j + 1]));
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            for (int e = 0; e < 4; ++e) {
                const int m = m0 + 16 * i + lane / 4 + e / 2 * 8, n = n0 + warp * 16 + 8 * j + lane % 4 * 2 + e % 2;
                if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc[i][j][e]);
            }
}
