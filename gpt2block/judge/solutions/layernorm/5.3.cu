// Chapter 5, exercise 3: LayerNorm 3 with two rows for each warp
//
// The loads of both rows are in flight at the same time, and a lane uses each value of gamma
// and beta for both rows. If N is odd, the last warp has one row: it reads this row twice, and
// stores it once.
//   gpt2block kernels layernorm --mine my.cu
//
// launch: grid=ceil(N / 16) block=256
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

constexpr int LANES = 32;

extern "C" __global__ void my_layernorm(
    const float* __restrict__ x,      // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    float* __restrict__ out,          // (N, C)
    float eps, int N, int C) {
    const auto warp = cg::tiled_partition<LANES>(cg::this_thread_block());
    const int lane = warp.thread_rank();
    const int row = 2 * (blockIdx.x * warp.meta_group_size() + warp.meta_group_rank());
    if (row >= N) return;  // the same for the whole warp
    const bool two = row + 1 < N;
    const float* x_first = x + (long long)row * C;
    const float* x_second = two ? x_first + C : x_first;

    float first = 0.0f, second = 0.0f;
#pragma unroll 8  // loads of each row in flight at a time
    for (int c = lane; c < C; c += LANES) {
        first += x_first[c];
        second += x_second[c];
    }
    const float first_mean = cg::reduce(warp, first, cg::plus<float>()) / C;
    const float second_mean = cg::reduce(warp, second, cg::plus<float>()) / C;

    first = second = 0.0f;
#pragma unroll 8
    for (int c = lane; c < C; c += LANES) {
        first += (x_first[c] - first_mean) * (x_first[c] - first_mean);
        second += (x_second[c] - second_mean) * (x_second[c] - second_mean);
    }
    const float first_rstd = rsqrtf(cg::reduce(warp, first, cg::plus<float>()) / C + eps);
    const float second_rstd = rsqrtf(cg::reduce(warp, second, cg::plus<float>()) / C + eps);

    float* out_row = out + (long long)row * C;
#pragma unroll 4
    for (int c = lane; c < C; c += LANES) {
        const float g = gamma[c], b = beta[c];
        out_row[c] = (x_first[c] - first_mean) * first_rstd * g + b;
        if (two) out_row[C + c] = (x_second[c] - second_mean) * second_rstd * g + b;
    }
}
