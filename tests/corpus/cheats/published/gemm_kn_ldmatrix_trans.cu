#include "lib/storage.cuh"
// launch: grid=ceil(N / 16), ceil(M / 32) block=64
extern "C" __global__ void __launch_bounds__(64) gemm_rows(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(16) unsigned short At[32][24], Wt[16][24];
    const unsigned short* pa = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* pw = reinterpret_cast<const unsigned short*>(w);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m0 = blockIdx.y * 32, n0 = blockIdx.x * 16;
    float d[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int r = threadIdx.x / 2, h = threadIdx.x % 2 * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (m0 + r < M && k0 + h < K) v = *(const uint4*)(pa + (size_t)(m0 + r) * K + k0 + h);
        *(uint4*)&At[r][h] = v;
        if (threadIdx.x < 32) {
            v = make_uint4(0, 0, 0, 0);
            if (k0 + r < K && n0 + h < N) v = *(const uint4*)(pw + (size_t)(k0 + r) * N + n0 + h);
            *(uint4*)&Wt[r][h] = v;
        }
        __syncthreads();
        unsigned x[4], y[4];
        const unsigned sx = (unsigned)__cvta_generic_to_shared(&At[warp * 16 + lane % 16][lane / 16 * 8]);
        const unsigned sy = (unsigned)__cvta_generic_to_shared(&Wt[lane % 16][lane / 16 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(sx) : "memory");
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"(sy) : "memory");
#pragma unroll
        for (int j = 0; j < 2; ++j)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(d[4 * j]), "+f"(d[4 * j + 1]), "+f"(d[4 * j + 2]), "+f"(d[4 * j + 3])
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[2 * j]), "r"(y[2 * j + 1]));
        __syncthreads();
    }
    for (int i = 0; i < 8; ++i) {
        const int m = m0 + warp * 16 + lane / 4 + (i & 2) * 4, n = n0 + i / 4 * 8 + lane % 4 * 2 + (i & 1);
        if (m < M && n < N) out[(size_t)m * N + n] = narrow(d[i]);
    }
}
