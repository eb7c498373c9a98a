#include <cub/block/block_scan.cuh>
#include "lib/storage.cuh"
// launch: grid=M block=128
extern "C" __global__ void __launch_bounds__(128) rms_scan(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ out, float eps, int C) {
    typedef cub::BlockScan<float, 128> Scan;
    __shared__ Scan::TempStorage temp;
    const size_t at = (size_t)blockIdx.x * C;
    float mine = 0.f, running, total;
    for (int c = threadIdx.x; c < C; c += 128) mine += widen(x[at + c]) * widen(x[at + c]);
    Scan(temp).InclusiveSum(mine, running, total);
    const float scale = rsqrtf(total / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) out[at + c] = narrow(widen(x[at + c]) * scale * widen(weight[c]));
}
