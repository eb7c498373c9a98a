// launch: grid=ceil(N / 64), M block=64
__device__ unsigned long long slowest_block;

extern "C" __global__ void matmul_timed(const float* A, const float* B, const float* bias, float* C, int M, int K, int N) {
    const long long begin = clock64();
    const int n = blockIdx.x * 64 + threadIdx.x, m = blockIdx.y;
    if (n < N) {
        float sum = 0.f;
        for (int k = 0; k < K; ++k) sum += A[(long long)m * K + k] * B[(long long)k * N + n];
        C[(long long)m * N + n] = bias[n] + sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const long long cycles = clock64() - begin;
        if (cycles > 0) atomicMax(&slowest_block, (unsigned long long)cycles);
    }
}
