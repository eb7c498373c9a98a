// launch: grid=ceil(N / 32), ceil(M / 32) block=256
extern "C" __global__ void __launch_bounds__(256) sgemm_pipe(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float sa[2][32][17], sb[2][16][32];
    const int tid = threadIdx.x, m0 = blockIdx.y * 32, n0 = blockIdx.x * 32, tiles = (K + 15) / 16;
    auto cp = [](float* to, const float* from, bool in) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(in ? 4 : 0) : "memory");
    };
    auto load = [&](int t) {
        const int s = t % 2;
        for (int i = tid; i < 512; i += 256) {
            const int ma = i / 16, ka = i % 16, kb = i / 32, nb = i % 32;
            const bool ia = m0 + ma < M && t * 16 + ka < K, ib = t * 16 + kb < K && n0 + nb < N;
            cp(&sa[s][ma][ka], ia ? A + (size_t)(m0 + ma) * K + t * 16 + ka : A, ia);
            cp(&sb[s][kb][nb], ib ? B + (size_t)(t * 16 + kb) * N + n0 + nb : B, ib);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float acc[4] = {};
    const int n = tid % 32, m = tid / 32;
    load(0);
    for (int t = 0; t < tiles; ++t) {
        if (t + 1 < tiles) {
            load(t + 1);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        const int s = (t + 1) % 2;
        for (int k = 0; k < 16; ++k)
            for (int i = 0; i < 4; ++i) acc[i] += sa[s][m + 8 * i][k] * sb[s][k][n];
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        if (m0 + m + 8 * i < M && n0 + n < N) C[(size_t)(m0 + m + 8 * i) * N + n0 + n] = acc[i] + bias[n0 + n];
}
