#include "lib/storage.cuh"
// launch: grid=ceil(N / 16), ceil(M / 16) block=32
extern "C" __global__ void __launch_bounds__(32) gemm_warp(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(16) unsigned short ta[16][24], tw[16][24];
    const int lane = threadIdx.x, m0 = blockIdx.y * 16, n0 = blockIdx.x * 16, r = lane / 2, h = lane % 2 * 8;
    const uint4 zero = make_uint4(0u, 0u, 0u, 0u);
    float acc[2][4] = {};
    for (int k = 0; k < K; k += 16) {
        const bool k_in = k + h < K;
        *(uint4*)&ta[r][h] = m0 + r < M && k_in ? *(const uint4*)((const unsigned short*)a + (size_t)(m0 + r) * K + k + h) : zero;
        *(uint4*)&tw[r][h] = n0 + r < N && k_in ? *(const uint4*)((const unsigned short*)w + (size_t)(n0 + r) * K + k + h) : zero;
        __syncwarp();
        unsigned x0, x1, x2, x3, y[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3)
                     : "r"((unsigned)__cvta_generic_to_shared(&ta[lane % 16][lane / 16 * 8])) : "memory");
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                     : "r"((unsigned)__cvta_generic_to_shared(&tw[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8])) : "memory");
        for (int j = 0; j < 2; ++j)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
                         : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(y[2 * j]), "r"(y[2 * j + 1]));
        __syncwarp();
    }
    for (int j = 0; j < 2; ++j)
        for (int e = 0; e < 4; ++e) {
            const int m = m0 + lane / 4 + e / 2 * 8, n = n0 + 8 * j + lane % 4 * 2 + e % 2;
            if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc[j][e]);
        }
}
