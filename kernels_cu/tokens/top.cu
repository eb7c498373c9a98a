// The K most likely tokens of each row of logits, with their log-probabilities, the most likely token first.
//
//   logits (M, V), ids (M, K), logprobs (M, K): logit - log(sum over j of exp(logits[j])). Of equal logits, the lower
//   id comes first. With fewer than K tokens in a row, the remaining entries are id -1 and -inf
//
//   top_logprobs_kernel: a thread keeps the best few of its columns; each warp lists its K best, one warp merges the
//       lists. A row has one block. A thread keeps its best columns in registers, sorted. A thread reads its columns
//       again only if all columns that the thread keeps are among the K best columns of the warp. There is no barrier
//       before the lists are complete
//
// A row with NaN gives NaN for all log-probabilities.
#include "lib/logits.cuh"

#ifndef TOP_THREADS  // threads per block: a multiple of 32
#define TOP_THREADS 512
#endif
#ifndef TOP_KEPT  // tokens that a thread keeps at a time
#define TOP_KEPT 3
#endif
#ifndef TOP_LOADS  // loads in flight per thread
#define TOP_LOADS 8
#endif

constexpr int THREADS = TOP_THREADS, WARPS = THREADS / 32, KEPT = TOP_KEPT, LOADS = TOP_LOADS;
constexpr int MAX = 32;           // maximum of K
constexpr int NONE = 0x7fffffff;  // id of a missing token
static_assert(THREADS % 32 == 0 && WARPS <= 32, "one lane of a warp for each list");

// The best tokens of a thread's columns, sorted.
struct Kept {
    Best best[KEPT];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < KEPT; ++i) best[i] = {-INFINITY, NONE};
    }

    __device__ __forceinline__ void add(Best x) {  // inserts x; the last token drops out
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const Best other = best[i];
            const bool earlier = x.before(other);
            best[i] = earlier ? x : other;
            x = earlier ? other : x;
        }
    }

    __device__ __forceinline__ void pop() {  // removes the first token
#pragma unroll
        for (int i = 0; i + 1 < KEPT; ++i) best[i] = best[i + 1];
        best[KEPT - 1] = {-INFINITY, NONE};
    }
};

// Keeps the best of this thread's columns that rank after `last`. Adds all columns to `online`, if not null.
__device__ void scan(const float* x, int V, const Best& last, Kept& kept, Online* online) {
    kept.clear();
    for (int first = threadIdx.x; first < V; first += THREADS * LOADS) {
        float l[LOADS];
        load_columns(x + first, V - first, THREADS, -INFINITY, l);
        if (online) online->take(l);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const Best each = {l[i], first + i * THREADS};
            if (each.id < V && last.before(each)) kept.add(each);
        }
    }
}

// grid (M), block (TOP_THREADS)
// Launched by operation (variant): top_logprobs (top)
extern "C" __global__ void __launch_bounds__(TOP_THREADS) top_logprobs_kernel(
    const float* logits,  // (M, V)
    int* ids,             // (M, K)
    float* logprobs,      // (M, K)
    int V, int K) {
    __shared__ Best lists[WARPS][MAX];
    __shared__ Online parts[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* x = logits + (long long)blockIdx.x * V;

    Kept kept;
    Online online = {-INFINITY, 0.0f};
    scan(x, V, {INFINITY, -1}, kept, &online);
    online = online.of_warp();
    if (lane == 0) parts[warp] = online;
    for (int k = 0; k < K; ++k) {
        const Best mine = kept.best[0], best = mine.of_warp();
        if (lane == 0) lists[warp][k] = best;
        if (mine.id == best.id && best.id != NONE) {
            kept.pop();
            if (kept.best[0].id == NONE) scan(x, V, best, kept, nullptr);
        }
    }
    __syncthreads();
    if (warp > 0) return;

    const Online all = (lane < WARPS ? parts[lane] : Online{-INFINITY, 0.0f}).of_warp();
    const float log_sum = logf(all.sum);
    int next = 0;  // next entry of the list that this lane merges
    for (int k = 0; k < K; ++k) {
        const Best mine = lane < WARPS && next < K ? lists[lane][next] : Best{-INFINITY, NONE};
        const Best best = mine.of_warp();
        if (mine.id == best.id) ++next;
        if (lane > 0) continue;
        const long long at = (long long)blockIdx.x * K + k;
        ids[at] = best.id == NONE ? -1 : best.id;
        logprobs[at] = best.l - all.max - log_sum;
    }
}
