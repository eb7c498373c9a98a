// launch: grid=ceil(N / 32), ceil(M / 8), 4 block=32, 8
extern "C" __global__ void matmul_split(const float* A, const float* B, const float* bias, float* C, int M, int K,
                                        int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    const int m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    const int slice = (K + 3) / 4;
    const int first = blockIdx.z * slice, last = min(K, first + slice);
    float sum = blockIdx.z == 0 ? bias[n] : 0.0f;
    for (int k = first; k < last; ++k) sum += A[(long long)m * K + k] * B[(long long)k * N + n];
    atomicAdd(&C[(long long)m * N + n], sum);
}
