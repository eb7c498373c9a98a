// launch: grid=ceil(N / 32), M block=32, 8
extern "C" __global__ void linear_slices(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    __shared__ float parts[8][32];
    const int n = blockIdx.x * 32 + threadIdx.x, m = blockIdx.y, slice = threadIdx.y;
    float sum = 0.0f;
    if (n < N) {
        for (int k = slice; k < K; k += 8) sum += x[(long long)m * K + k] * w[(long long)n * K + k];
    }
    parts[slice][threadIdx.x] = sum;
    __syncthreads();
    if (slice == 0 && n < N) {
        float total = bias[n];
        for (int s = 0; s < 8; ++s) total += parts[s][threadIdx.x];
        out[(long long)m * N + n] = total;
    }
}
