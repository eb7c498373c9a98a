// launch: grid=ceil(N / 4), M block=128
extern "C" __global__ void linear_warp(const float* x, const float* w, const float* bias, float* out, int N, int K) {
    const int lane = threadIdx.x % 32, n = blockIdx.x * 4 + threadIdx.x / 32, m = blockIdx.y;
    if (n >= N) return;
    const float* xr = x + (long long)m * K;
    const float* wr = w + (long long)n * K;
    float sum = 0.0f;
    if ((K & 3) == 0) {
        for (int k = 4 * lane; k < K; k += 128) {
            const float4 p = *(const float4*)(xr + k), q = *(const float4*)(wr + k);
            sum += p.x * q.x + p.y * q.y + p.z * q.z + p.w * q.w;
        }
    } else {
        for (int k = lane; k < K; k += 32) sum += xr[k] * wr[k];
    }
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (lane == 0) out[(long long)m * N + n] = sum + bias[n];
}
