// launch: grid=N block=128
__device__ float gelu_of(float v) { return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); }

__device__ void finish(const float* __restrict__ centered, float* __restrict__ to, float rstd, int C, int shift) {
    for (int c = threadIdx.x; c < C; c += blockDim.x) to[c] = gelu_of(centered[c] * rstd);
    __syncthreads();
}
__device__ float total(float v, float* s) {
    s[threadIdx.x] = v;
    __syncthreads();
    for (int h = blockDim.x / 2; h; h /= 2) { if (threadIdx.x < h) s[threadIdx.x] += s[threadIdx.x + h]; __syncthreads(); }
    v = s[0];
    __syncthreads();
    return v;
}
extern "C" __global__ void lngelu_scratch(const float* x, float* y, float eps, int N, int C) {
    __shared__ float s[128];
    const float* r = x + (long long)blockIdx.x * C;
    float* o = y + (long long)blockIdx.x * C;
    const float* __restrict__ back = y + (long long)blockIdx.x * C;
    float a = 0.f, q = 0.f;
    for (int c = threadIdx.x; c < C; c += 128) a += r[c];
    const float mean = total(a, s) / C;
    for (int c = threadIdx.x; c < C; c += 128) o[c] = r[c] - mean;
    __syncthreads();
    for (int c = C - 1 - (int)threadIdx.x; c >= 0; c -= 128) q += __ldg(back + c) * __ldg(back + c);
    finish(back, o, rsqrtf(total(q, s) / C + eps), C, 0);
}
