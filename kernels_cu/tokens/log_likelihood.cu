// Log-likelihood of tokens: out[i] = logits[i][t] - log(sum over j of exp(logits[i][j])), t = targets[i].
//
//   logits (N, V), targets (N) of int, out (N)
//
//   log_likelihood_kernel: one block per row: maximum and sum in one pass. Each thread keeps several loads in flight
//
// The result is NaN for a row with NaN or +inf or with only -inf, and for a target outside 0..V-1. For a target whose
// logit is -inf, the result is -inf.
#include "lib/logits.cuh"
#include "lib/overlap.cuh"

#ifndef LL_THREADS  // threads per block: a power of two, at least 32
#define LL_THREADS 512
#endif
#ifndef LL_LOADS  // loads in flight per thread
#define LL_LOADS 8
#endif

constexpr int WARPS = LL_THREADS / 32;
static_assert(LL_THREADS >= 32 && LL_THREADS <= 1024 && (LL_THREADS & (LL_THREADS - 1)) == 0, "a power of two");

// grid (N), block (LL_THREADS)
// Launched by operation (variant): log_likelihood (block)
extern "C" __global__ void __launch_bounds__(LL_THREADS) log_likelihood_kernel(
    const float* logits,  // (N, V)
    const int* targets,   // (N)
    float* out,           // (N)
    int V) {
    __shared__ Online parts[WARPS];
    let_next_start();
    wait_for_previous();
    const int thread = threadIdx.x, row = blockIdx.x, target = targets[row];
    const float* x = logits + (long long)row * V;
    const bool inside = 0 <= target && target < V;
    const float chosen = inside ? x[target] : __int_as_float(0x7fffffff);

    Online own = {-INFINITY, 0.0f};
    for (int first = thread; first < V; first += LL_THREADS * LL_LOADS) {
        float v[LL_LOADS];
        load_columns(x + first, V - first, LL_THREADS, -INFINITY, v);
        own.take(v);
    }
    own = own.of_warp();
    if (thread % 32 == 0) parts[thread / 32] = own;
    __syncthreads();
    if (thread >= 32) return;
    const Online all = (thread < WARPS ? parts[thread] : Online{-INFINITY, 0.0f}).of_warp();
    if (thread == 0) out[row] = chosen - all.max - logf(all.sum);
}
