// launch: grid=2, M block=128
#include "lib/storage.cuh"
__device__ float halves[2 * 65536];
__device__ int seen[65536];
extern "C" __global__ void rmsnorm_pair(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float warp_sums[4];
    __shared__ bool last;
    const int row = blockIdx.y, half = blockIdx.x;
    const T* r = x + (long long)row * C;
    const int mid = C / 2, from = half ? mid : 0, to = half ? C : mid;
    float s = 0.f;
    for (int c = from + threadIdx.x; c < to; c += 128) s += widen(r[c]) * widen(r[c]);
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        halves[2 * row + half] = warp_sums[0] + warp_sums[1] + warp_sums[2] + warp_sums[3];
        __threadfence();
        last = atomicAdd(&seen[row], 1) == 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    const volatile float* both = halves + 2 * row;
    const float scale = rsqrtf((both[0] + both[1]) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) out[(long long)row * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
