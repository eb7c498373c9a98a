// launch: grid=4, M block=128
#include "lib/storage.cuh"
#define PARTS 4
#define CAP 8192
__device__ float partial[CAP * PARTS];
__device__ unsigned int arrived[CAP];

extern "C" __global__ void rmsnorm_parts(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float sums[4];
    __shared__ float total;
    __shared__ bool last;
    const int row = blockIdx.y, part = blockIdx.x, t = threadIdx.x;
    const bool split = row < CAP;
    if (!split && part > 0) return;
    const T* r = x + (long long)row * C;
    const int from = split ? (int)((long long)C * part / PARTS) : 0;
    const int to = split ? (int)((long long)C * (part + 1) / PARTS) : C;
    float s = 0.f;
    for (int c = from + t; c < to; c += 128) { const float v = widen(r[c]); s += v * v; }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
    if (t % 32 == 0) sums[t / 32] = s;
    __syncthreads();
    if (t == 0) {
        total = sums[0] + sums[1] + sums[2] + sums[3];
        last = true;
        if (split) {
            *(volatile float*)&partial[row * PARTS + part] = total;
            __threadfence();
            last = atomicAdd(&arrived[row], 1u) == PARTS - 1;
            if (last) {
                __threadfence();
                const volatile float* p = partial + row * PARTS;
                total = (p[0] + p[1]) + (p[2] + p[3]);
                atomicExch(&arrived[row], 0u);
            }
        }
    }
    __syncthreads();
    if (!last) return;
    const float scale = rsqrtf(total / C + eps);
    for (int c = t; c < C; c += 128) out[(long long)row * C + c] = narrow(widen(r[c]) * scale * widen(weight[c]));
}
