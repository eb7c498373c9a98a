#include "lib/storage.cuh"
// launch: grid=ceil(N / 32), ceil(M / 16) block=64
extern "C" __global__ void __launch_bounds__(64) gemm_kn(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(16) unsigned short ta[16][24], tw[16][40];
    const unsigned short* pa = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* pw = reinterpret_cast<const unsigned short*>(w);
    const size_t stride = K;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m0 = blockIdx.y * 16, n0 = blockIdx.x * 32;
    auto cp16 = [](void* to, const unsigned short* from, int bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
    };
    float acc[2][4] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int wr = threadIdx.x >> 2, wc = (threadIdx.x & 3) * 8;
        const bool iw = k0 + wr < K && n0 + wc < N;
        cp16(&tw[wr][wc], iw ? pw + (k0 + wr) * stride + n0 + wc : pw, iw ? 16 : 0);
        if (threadIdx.x < 32) {
            const int r = lane >> 1, c = (lane & 1) * 8;
            const bool ia = m0 + r < M && k0 + c < K;
            cp16(&ta[r][c], ia ? pa + (size_t)(m0 + r) * K + k0 + c : pa, ia ? 16 : 0);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        unsigned x[4], y[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"((unsigned)__cvta_generic_to_shared(&ta[lane & 15][(lane >> 4) * 8])) : "memory");
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                     : "r"((unsigned)__cvta_generic_to_shared(&tw[lane & 15][warp * 16 + (lane >> 4) * 8])) : "memory");
        for (int j = 0; j < 2; ++j)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[2 * j]), "r"(y[2 * j + 1]));
        __syncthreads();
    }
    for (int j = 0; j < 2; ++j)
        for (int e = 0; e < 4; ++e) {
            const int m = m0 + (lane >> 2) + (e >> 1) * 8, n = n0 + warp * 16 + 8 * j + (lane & 3) * 2 + (e & 1);
            if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc[j][e]);
        }
}
