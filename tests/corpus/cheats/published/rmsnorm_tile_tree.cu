#include <cooperative_groups.h>
#include "lib/storage.cuh"
namespace cg = cooperative_groups;
// launch: grid=ceil(M / 4) block=128
extern "C" __global__ void __launch_bounds__(128) rms_tiles(const T* x, const T* weight, T* out, float eps, int M, int C) {
    __shared__ float cells[128];
    auto tile = cg::tiled_partition<32>(cg::this_thread_block());
    const int rank = tile.thread_rank(), which = threadIdx.x / 32, row = blockIdx.x * 4 + which;
    float* mine = cells + which * 32;
    float ss = 0.f;
    if (row < M)
        for (int c = rank; c < C; c += 32) ss += widen(x[(size_t)row * C + c]) * widen(x[(size_t)row * C + c]);
    mine[rank] = ss;
    for (int d = 16; d > 0; d /= 2)
        if (rank < d) mine[rank] += mine[rank + d];
    const float scale = rsqrtf(mine[0] / C + eps);
    if (row < M)
        for (int c = rank; c < C; c += 32) out[(size_t)row * C + c] = narrow(widen(x[(size_t)row * C + c]) * scale * widen(weight[c]));
}
