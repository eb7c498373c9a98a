// launch: grid=ceil(rows / 16) block=128
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

extern "C" __global__ void softmax_groups(const float* x, float* y, int rows, int n) {
    cg::thread_block_tile<8> tile = cg::tiled_partition<8>(cg::this_thread_block());
    const int wanted = blockIdx.x * 16 + threadIdx.x / 8;
    const bool valid = wanted < rows;
    const long long base = valid ? (long long)wanted * n : 0;

    float m = -INFINITY;
    for (int i = tile.thread_rank(); i < n; i += 8) m = fmaxf(m, x[base + i]);
    for (int o = 4; o > 0; o /= 2) m = fmaxf(m, tile.shfl_xor(m, o));

    float s = 0.0f;
    for (int i = tile.thread_rank(); i < n; i += 8) s += expf(x[base + i] - m);
    for (int o = 4; o > 0; o /= 2) s += tile.shfl_xor(s, o);

    if (valid) {
        for (int i = tile.thread_rank(); i < n; i += 8) y[base + i] = expf(x[base + i] - m) / s;
    }
}
