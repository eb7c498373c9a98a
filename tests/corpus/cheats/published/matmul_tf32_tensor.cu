// launch: grid=ceil(N / 32), ceil(M / 16) block=128
__device__ __forceinline__ unsigned tf32(float v) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return r;
}

extern "C" __global__ void __launch_bounds__(128) matmul_tf32(const float* __restrict__ A, const float* __restrict__ B,
                                                             const float* __restrict__ bias, float* __restrict__ C, int M, int K, int N) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m = blockIdx.y * 16 + g, n = blockIdx.x * 32 + threadIdx.x / 32 * 8;
    float d[4] = {};
    for (int k = 0; k < K; k += 8) {
        unsigned a[4], b[2];
        for (int i = 0; i < 4; ++i) {
            const int row = m + (i & 1) * 8, col = k + t + (i >> 1) * 4;
            a[i] = tf32(row < M && col < K ? A[(size_t)row * K + col] : 0.f);
        }
        for (int i = 0; i < 2; ++i) {
            const int row = k + t + 4 * i;
            b[i] = tf32(row < K && n + g < N ? B[(size_t)row * N + n + g] : 0.f);
        }
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    for (int e = 0; e < 4; ++e) {
        const int row = m + e / 2 * 8, col = n + 2 * t + e % 2;
        if (row < M && col < N) C[(size_t)row * N + col] = d[e] + bias[col];
    }
}
