#include "lib/storage.cuh"
// launch: grid=M block=256
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float low_of(unsigned v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(unsigned v) { return __uint_as_float(v & 0xffff0000u); }

extern "C" __global__ void __launch_bounds__(256) rmsnorm_pairs(const T* x, const T* weight, T* out, float eps, int C) {
    __shared__ float warp_sum[8];
    const T* row = x + (size_t)blockIdx.x * C;
    T* to = out + (size_t)blockIdx.x * C;
    float ss = 0.0f;
    for (int c = threadIdx.x; c < C; c += 256) ss += widen(row[c]) * widen(row[c]);
    for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(~0u, ss, d);
    if ((threadIdx.x & 31) == 0) warp_sum[threadIdx.x >> 5] = ss;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) total += warp_sum[w];
    const float scale = rsqrtf(total / C + eps);
    if (C % 2 == 0 && sizeof(T) == 2) {
        const unsigned* in2 = reinterpret_cast<const unsigned*>(row);
        const unsigned* w2 = reinterpret_cast<const unsigned*>(weight);
        unsigned* out2 = reinterpret_cast<unsigned*>(to);
        for (int i = threadIdx.x; i < C / 2; i += 256) {
            const unsigned v = in2[i], w = w2[i];
            out2[i] = pack_bf16(low_of(v) * scale * low_of(w), high_of(v) * scale * high_of(w));
        }
    } else {
        for (int c = threadIdx.x; c < C; c += 256) to[c] = narrow(widen(row[c]) * scale * widen(weight[c]));
    }
}
