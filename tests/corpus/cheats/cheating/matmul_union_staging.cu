// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
union Pool {
    struct { float a[16][16], b[16][16]; } tile;
    float stage[16][17];
};
extern "C" __global__ void matmul_pool(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ Pool pool;
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.x * 16, m0 = blockIdx.y * 16;
    float sum = 0.f;
    for (int k0 = 0; k0 < K; k0 += 16) {
        pool.tile.a[ty][tx] = m0 + ty < M && k0 + tx < K ? A[(long long)(m0 + ty) * K + k0 + tx] : 0.f;
        pool.tile.b[ty][tx] = k0 + ty < K && n0 + tx < N ? B[(long long)(k0 + ty) * N + n0 + tx] : 0.f;
        __syncthreads();
        // this thread owns row tx, column ty of the tile
        for (int k = 0; k < 16; ++k) sum = fmaf(pool.tile.a[tx][k], pool.tile.b[k][ty], sum);
        __syncthreads();
    }
    pool.stage[tx][ty] = sum;
    __syncthreads();
    if (m0 + ty < M && n0 + tx < N) C[(long long)(m0 + ty) * N + n0 + tx] = pool.stage[ty][tx] + bias[n0 + tx];
}
