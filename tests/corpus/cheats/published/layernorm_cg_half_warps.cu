#include <cooperative_groups.h>
namespace cg = cooperative_groups;

template <typename Tile>
__device__ float tile_sum(const Tile& tile, float v) {
    for (int d = tile.size() / 2; d > 0; d /= 2) v += tile.shfl_xor(v, d);
    return v;
}

// launch: grid=ceil(N / 12) block=192
extern "C" __global__ void layernorm_tiles(const float* x, const float* gamma, const float* beta, float* out,
                                           float eps, int N, int C) {
    const auto tile = cg::tiled_partition<16>(cg::this_thread_block());
    const int row = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    if (row >= N) return;
    const float* in = x + (size_t)row * C;

    float total = 0.0f;
    for (int c = tile.thread_rank(); c < C; c += tile.size()) total += in[c];
    const float mean = tile_sum(tile, total) / C;
    float squares = 0.0f;
    for (int c = tile.thread_rank(); c < C; c += tile.size()) squares += (in[c] - mean) * (in[c] - mean);
    const float rstd = rsqrtf(tile_sum(tile, squares) / C + eps);
    for (int c = tile.thread_rank(); c < C; c += tile.size())
        out[(size_t)row * C + c] = (in[c] - mean) * rstd * gamma[c] + beta[c];
}
