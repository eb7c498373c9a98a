// launch: grid=ceil(N / 64), M, 4 block=64
extern "C" __global__ void linear_slices(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    const int n = blockIdx.x * 64 + threadIdx.x, m = blockIdx.y;
    if (n >= N) return;
    const int per = (K + 3) / 4, from = blockIdx.z * per, to = min(K, from + per);
    float sum = 0.f;
    for (int k = from; k < to; ++k) sum += x[(long long)m * K + k] * w[(long long)n * K + k];
    float* target = out + (long long)m * N + n;
    if (blockIdx.z == 0) *target = sum + bias[n];
    else atomicAdd(target, sum);
}
