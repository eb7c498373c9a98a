#include "lib/storage.cuh"
// One warp per 16 x 8 tile; fragments come straight from global memory.
// launch: grid=ceil(N / 32), ceil(M / 16) block=128
extern "C" __global__ void __launch_bounds__(128) hgemm_global(const T* a, const T* w, T* out, int M, int N, int K) {
    const unsigned short* pa = reinterpret_cast<const unsigned short*>(a);
    const unsigned short* pw = reinterpret_cast<const unsigned short*>(w);
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int m = blockIdx.y * 16 + g, n0 = blockIdx.x * 32 + (threadIdx.x >> 5) * 8;
    auto two = [&](const unsigned short* p, int row, int rows, int k) -> unsigned {
        return row < rows && k < K ? *reinterpret_cast<const unsigned*>(p + (size_t)row * K + k) : 0u;
    };
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    for (int k = 2 * t; k - 2 * t < K; k += 16) {
        const unsigned a0 = two(pa, m, M, k), a1 = two(pa, m, M, k + 8), a2 = two(pa, m + 8, M, k), a3 = two(pa, m + 8, M, k + 8);
        const unsigned b0 = two(pw, n0 + g, N, k), b1 = two(pw, n0 + g, N, k + 8);
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const int row = m + (e >> 1) * 8, col = n0 + 2 * t + (e & 1);
        if (row < M && col < N) out[(size_t)row * N + col] = narrow(c[e]);
    }
}
