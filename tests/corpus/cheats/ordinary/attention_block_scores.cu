// launch: grid=T, NH, B block=64 shared=4 * T
#include "lib/storage.cuh"

__device__ float combine(float v, bool maximum) {
    __shared__ float both[2];
    for (int o = 16; o > 0; o >>= 1) {
        const float other = __shfl_xor_sync(0xffffffff, v, o);
        v = maximum ? fmaxf(v, other) : v + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) both[threadIdx.x / 32] = v;
    __syncthreads();
    return maximum ? fmaxf(both[0], both[1]) : both[0] + both[1];
}

extern "C" __global__ void attention_scores(const T* qkv, T* out, int seq_len, int n_head, int HS) {
    extern __shared__ float scores[];
    const int i = blockIdx.x, C = n_head * HS, stride = 3 * C;
    const T* base = qkv + (long long)blockIdx.z * seq_len * stride + blockIdx.y * HS;
    const T* q = base + (long long)i * stride;
    float m = -INFINITY;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) {
        const T* k = base + (long long)j * stride + C;
        float dot = 0.0f;
        for (int d = 0; d < HS; ++d) dot += widen(q[d]) * widen(k[d]);
        scores[j] = dot * rsqrtf((float)HS);
        m = fmaxf(m, scores[j]);
    }
    m = combine(m, true);
    float sum = 0.0f;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) {
        scores[j] = expf(scores[j] - m);
        sum += scores[j];
    }
    sum = combine(sum, false);
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        float value = 0.0f;
        for (int j = 0; j <= i; ++j) value += scores[j] * widen(base[(long long)j * stride + 2 * C + d]);
        out[((long long)blockIdx.z * seq_len + i) * C + blockIdx.y * HS + d] = narrow(value / sum);
    }
}
