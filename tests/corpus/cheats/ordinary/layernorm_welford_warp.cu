// launch: grid=ceil(N / 8) block=256
struct Moments {
    float count, mean, m2;
};

__device__ Moments combine(Moments a, Moments b) {
    const float count = a.count + b.count;
    if (count == 0.0f) return a;
    const float delta = b.mean - a.mean, part = b.count / count;
    return {count, a.mean + delta * part, a.m2 + b.m2 + delta * delta * a.count * part};
}

extern "C" __global__ void layernorm_welford(const float* x, const float* gamma, const float* beta, float* out,
                                             float eps, int N, int C) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    x += (size_t)row * C;
    out += (size_t)row * C;

    Moments own = {0.0f, 0.0f, 0.0f};
    for (int c = lane; c < C; c += 32) {
        own.count += 1.0f;
        const float delta = x[c] - own.mean;
        own.mean += delta / own.count;
        own.m2 += delta * (x[c] - own.mean);
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        Moments other;
        other.count = __shfl_xor_sync(0xffffffff, own.count, offset);
        other.mean = __shfl_xor_sync(0xffffffff, own.mean, offset);
        other.m2 = __shfl_xor_sync(0xffffffff, own.m2, offset);
        own = combine(own, other);
    }
    const float rstd = rsqrtf(own.m2 / C + eps);
    for (int c = lane; c < C; c += 32) out[c] = (x[c] - own.mean) * rstd * gamma[c] + beta[c];
}
