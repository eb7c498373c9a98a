#include "lib/storage.cuh"
// launch: grid=ceil(N / 64), ceil(M / 64) block=128
constexpr int DEPTH = 3, KT = 32;
__device__ __forceinline__ int place(int row, int chunk) { return row * KT + ((chunk ^ (row >> 1)) & 3) * 8; }

struct Loader {
    const unsigned short* base;
    int first, rows, K;
    __device__ void operator()(unsigned short* to, int k0) const {
#pragma unroll
        for (int i = threadIdx.x; i < 64 * 4; i += 128) {
            const int r = i >> 2, c = i & 3, k = k0 + c * 8;
            const bool in = first + r < rows && k < K;
            const unsigned short* from = in ? base + (size_t)(first + r) * K + k : base;
            const unsigned at = (unsigned)__cvta_generic_to_shared(to + place(r, c));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(in ? 16 : 0) : "memory");
        }
    }
};

__device__ __forceinline__ void ldmatrix4(unsigned* r, const unsigned short* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(p)) : "memory");
}

extern "C" __global__ void __launch_bounds__(128) gemm_bf16(const T* a, const T* w, T* out, int M, int N, int K) {
    __shared__ __align__(128) unsigned short sa[DEPTH][64 * KT], sb[DEPTH][64 * KT];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wm = warp / 2 * 32, wn = warp % 2 * 32;
    const Loader load_a{reinterpret_cast<const unsigned short*>(a), (int)blockIdx.y * 64, M, K};
    const Loader load_w{reinterpret_cast<const unsigned short*>(w), (int)blockIdx.x * 64, N, K};
    const int tiles = (K + KT - 1) / KT;
    float acc[2][4][4] = {};

    for (int t = 0; t < DEPTH - 1; ++t) {
        if (t < tiles) { load_a(sa[t], t * KT); load_w(sb[t], t * KT); }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    for (int t = 0; t < tiles; ++t) {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncthreads();
        const int ahead = t + DEPTH - 1;
        if (ahead < tiles) { load_a(sa[ahead % DEPTH], ahead * KT); load_w(sb[ahead % DEPTH], ahead * KT); }
        asm volatile("cp.async.commit_group;" ::: "memory");
        const unsigned short *pa = sa[t % DEPTH], *pb = sb[t % DEPTH];
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            unsigned fa[2][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ldmatrix4(fa[i], pa + place(wm + i * 16 + (lane & 15), kk * 2 + (lane >> 4)));
                ldmatrix4(fb[i], pb + place(wn + i * 16 + (lane & 7) + (lane >> 4) * 8, kk * 2 + (lane >> 3 & 1)));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float* d = acc[i][j];
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                                 : "r"(fa[i][0]), "r"(fa[i][1]), "r"(fa[i][2]), "r"(fa[i][3]),
                                   "r"(fb[j / 2][j % 2 * 2]), "r"(fb[j / 2][j % 2 * 2 + 1]));
                }
        }
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
            for (int e = 0; e < 4; ++e) {
                const int m = blockIdx.y * 64 + wm + i * 16 + (lane >> 2) + (e >> 1) * 8;
                const int n = blockIdx.x * 64 + wn + j * 8 + (lane & 3) * 2 + (e & 1);
                if (m < M && n < N) out[(size_t)m * N + n] = narrow(acc[i][j][e]);
            }
}
