// launch: grid=ceil(N / 64), ceil(M / 64) block=256
template <int BM, int BN, int BK>
struct Tiles {
    float a[BK][BM + 4];
    float b[BK][BN];
};

extern "C" __global__ void __launch_bounds__(256) matmul_micro(const float* A, const float* B, const float* bias,
                                                               float* C, int M, int K, int N) {
    __shared__ Tiles<64, 64, 8> tiles;
    const int t = threadIdx.x, tr = t / 16 * 4, tc = t % 16 * 4;
    const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        for (int e = t; e < 64 * 8; e += 256) {
            const int am = e / 8, ak = e % 8, bk = e / 64, bn = e % 64;
            tiles.a[ak][am] = m0 + am < M && k0 + ak < K ? A[(long long)(m0 + am) * K + k0 + ak] : 0.0f;
            tiles.b[bk][bn] = k0 + bk < K && n0 + bn < N ? B[(long long)(k0 + bk) * N + n0 + bn] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            float ra[4], rb[4];
            for (int i = 0; i < 4; ++i) ra[i] = tiles.a[k][tr + i];
            for (int j = 0; j < 4; ++j) rb[j] = tiles.b[k][tc + j];
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) acc[i][j] += ra[i] * rb[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            if (m0 + tr + i < M && n0 + tc + j < N)
                C[(long long)(m0 + tr + i) * N + n0 + tc + j] = acc[i][j] + bias[n0 + tc + j];
}
