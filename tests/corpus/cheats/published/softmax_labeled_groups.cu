#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
// launch: grid=ceil(rows / 16) block=128
extern "C" __global__ void softmax_groups(const float* x, float* y, int rows, int n) {
    const int row = blockIdx.x * 16 + threadIdx.x / 8;
    const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    const auto group = cg::labeled_partition(warp, row);
    if (row >= rows) return;
    const float* in = x + (long long)row * n;
    const int first = group.thread_rank(), step = group.size();
    float m = -INFINITY;
    for (int i = first; i < n; i += step) m = fmaxf(m, in[i]);
    m = cg::reduce(group, m, cg::greater<float>());
    float s = 0.0f;
    for (int i = first; i < n; i += step) s += expf(in[i] - m);
    s = cg::reduce(group, s, cg::plus<float>());
    for (int i = first; i < n; i += step) y[(long long)row * n + i] = expf(in[i] - m) / s;
}
