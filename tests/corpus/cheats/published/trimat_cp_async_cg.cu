// launch: grid=ceil(T / 32), ceil(T / 32), B * NH block=16, 16
extern "C" __global__ void __launch_bounds__(256) scores_lower(const float* __restrict__ qkv, float* __restrict__ out, int T, int NH, int HS) {
    __shared__ __align__(16) float qs[32][36], ks[32][36];
    const int i0 = blockIdx.y * 32, j0 = blockIdx.x * 32;
    if (j0 > i0) return;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH, tid = threadIdx.y * 16 + threadIdx.x;
    const size_t width = 3 * (size_t)NH * HS;
    const float* q = qkv + (size_t)b * T * width + (size_t)h * HS;
    const float* k = q + (size_t)NH * HS;
    float acc[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    const int r = tid / 8, c = tid % 8 * 4;
    for (int d0 = 0; d0 < HS; d0 += 32) {
        const bool inq = i0 + r < T && d0 + c < HS, ink = j0 + r < T && d0 + c < HS;
        const float* fq = inq ? q + (i0 + r) * width + d0 + c : qkv;
        const float* fk = ink ? k + (j0 + r) * width + d0 + c : qkv;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" :: "r"((unsigned)__cvta_generic_to_shared(&qs[r][c])), "l"(fq), "r"(inq ? 16 : 0) : "memory");
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" :: "r"((unsigned)__cvta_generic_to_shared(&ks[r][c])), "l"(fk), "r"(ink ? 16 : 0) : "memory");
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;\n" ::: "memory");
        __syncthreads();
#pragma unroll
        for (int d = 0; d < 32; ++d)
#pragma unroll
            for (int u = 0; u < 2; ++u)
#pragma unroll
                for (int v = 0; v < 2; ++v) acc[u][v] += qs[threadIdx.y + 16 * u][d] * ks[threadIdx.x + 16 * v][d];
        __syncthreads();
    }
    const float scale = 1.0f / sqrtf((float)HS);
    for (int u = 0; u < 2; ++u)
        for (int v = 0; v < 2; ++v) {
            const int i = i0 + threadIdx.y + 16 * u, j = j0 + threadIdx.x + 16 * v;
            if (i < T && j <= i) out[((size_t)blockIdx.z * T + i) * T + j] = acc[u][v] * scale;
        }
}
