// launch: grid=ceil(M / 4) block=32, 4
#include <cuda_bf16.h>
#include "lib/storage.cuh"

extern "C" __global__ void rmsnorm_bf162(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int m = blockIdx.x * blockDim.y + threadIdx.y;
    if (m >= M) return;
    const long long start = (long long)m * C;
    const T* row = x + start;
    const int head = (int)(start & 1);        // rows that start at an odd element: one scalar first
    const int pairs = (C - head) / 2;
    const int last = head + 2 * pairs;        // C or C - 1

    float sum = 0.0f;
    if (threadIdx.x == 0 && head) sum += widen(row[0]) * widen(row[0]);
    if (threadIdx.x == 1 && last < C) sum += widen(row[last]) * widen(row[last]);
    const __nv_bfloat162* two = reinterpret_cast<const __nv_bfloat162*>(row + head);
    for (int p = threadIdx.x; p < pairs; p += 32) {
        const float2 v = __bfloat1622float2(two[p]);
        sum += v.x * v.x;
        sum += v.y * v.y;
    }
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    const float scale = rsqrtf(sum / C + eps);
    for (int c = threadIdx.x; c < C; c += 32) out[start + c] = narrow(widen(row[c]) * scale * widen(weight[c]));
}
