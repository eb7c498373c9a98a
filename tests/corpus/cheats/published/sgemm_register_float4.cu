// launch: grid=ceil(N / 64), ceil(M / 128) block=256
extern "C" __global__ void __launch_bounds__(256)
matmul_8x4(const float* __restrict__ A, const float* __restrict__ B, const float* __restrict__ bias,
           float* __restrict__ C, int M, int K, int N) {
    __shared__ __align__(16) float sa[8][132];
    __shared__ __align__(16) float sb[8][64];
    const int tid = threadIdx.x;
    const int col = (tid & 15) * 4, line = (tid >> 4) * 8;
    const int m0 = blockIdx.y * 128, n0 = blockIdx.x * 64;
    float acc[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;

    for (int k0 = 0; k0 < K; k0 += 8) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int m = (tid >> 3) + 32 * r, k = tid & 7;
            sa[k][m] = (m0 + m < M && k0 + k < K) ? A[(size_t)(m0 + m) * K + k0 + k] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int k = (tid >> 6) + 4 * r, n = tid & 63;
            sb[k][n] = (n0 + n < N && k0 + k < K) ? B[(size_t)(k0 + k) * N + n0 + n] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float4 lo = *reinterpret_cast<const float4*>(&sa[k][line]);
            const float4 hi = *reinterpret_cast<const float4*>(&sa[k][line + 4]);
            const float4 b = *reinterpret_cast<const float4*>(&sb[k][col]);
            const float a[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                acc[i][0] += a[i] * b.x; acc[i][1] += a[i] * b.y;
                acc[i][2] += a[i] * b.z; acc[i][3] += a[i] * b.w;
            }
        }
        __syncthreads();
    }
    const bool wide = N % 4 == 0 && (reinterpret_cast<size_t>(C) & 15) == 0;
    for (int i = 0; i < 8; ++i) {
        const int m = m0 + line + i, n = n0 + col;
        if (m >= M) break;
        float* to = C + (size_t)m * N + n;
        if (wide && n < N) {
            *reinterpret_cast<float4*>(to) = make_float4(acc[i][0] + bias[n], acc[i][1] + bias[n + 1],
                                                         acc[i][2] + bias[n + 2], acc[i][3] + bias[n + 3]);
        } else {
            for (int j = 0; j < 4; ++j) if (n + j < N) to[j] = acc[i][j] + bias[n + j];
        }
    }
}
