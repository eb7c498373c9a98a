#include "lib/storage.cuh"
// launch: grid=ceil(N / 32), ceil(M / 32) block=128
#define ROW 40
extern "C" __global__ void __launch_bounds__(128) gemm_async(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(16) unsigned short sa[2][32 * ROW], sw[2][32 * ROW];
    const unsigned short* ga = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* gw = reinterpret_cast<const unsigned short*>(w);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = blockIdx.y * 32, n0 = blockIdx.x * 32;
    const int wm = warp / 2 * 16, wn = warp % 2 * 16, r = threadIdx.x / 4, c = threadIdx.x % 4 * 8, tiles = (K + 31) / 32;
    auto load = [&](int t) {
        const int k = t * 32 + c;
        const bool ia = m0 + r < M && k < K, iw = n0 + r < N && k < K;
        const unsigned short *pa = ia ? ga + (size_t)(m0 + r) * K + k : ga, *pw = iw ? gw + (size_t)(n0 + r) * K + k : gw;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((unsigned)__cvta_generic_to_shared(&sa[t & 1][r * ROW + c])), "l"(pa), "r"(ia ? 16 : 0) : "memory");
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((unsigned)__cvta_generic_to_shared(&sw[t & 1][r * ROW + c])), "l"(pw), "r"(iw ? 16 : 0) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float d[2][4] = {};
    load(0);
    for (int t = 0; t < tiles; ++t) {
        if (t + 1 < tiles) load(t + 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        for (int k = 0; k < 32; k += 16) {
            unsigned x[4], y[4];
            const unsigned px = (unsigned)__cvta_generic_to_shared(&sa[t & 1][(wm + lane % 16) * ROW + k + lane / 16 * 8]);
            const unsigned py = (unsigned)__cvta_generic_to_shared(&sw[t & 1][(wn + lane % 8 + lane / 16 * 8) * ROW + k + lane / 8 % 2 * 8]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(px) : "memory");
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"(py) : "memory");
            for (int j = 0; j < 2; ++j)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[2 * j]), "r"(y[2 * j + 1]));
        }
        __syncthreads();
    }
    for (int j = 0; j < 2; ++j)
        for (int e = 0; e < 4; ++e) {
            const int m = m0 + wm + lane / 4 + e / 2 * 8, n = n0 + wn + 8 * j + lane % 4 * 2 + e % 2;
            if (m < M && n < N) out[(size_t)m * N + n] = narrow(d[j][e]);
        }
}
