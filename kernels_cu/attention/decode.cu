// Attention of one query per sequence, as in decoding, over a kv_cache that already contains the query's own key.
//
//   q, out (M, C), C = NH HS     k, v (B, n_ctx, C) of T     row, position (M): query m belongs to sequence row[m] of
//   the cache, and sees its keys 0..position[m]
//
// The keys are split: a block takes AS_KEYS neighbouring keys of a head of a sequence and computes
//
//   m = max s_j        s_j = q k_j log2(e) / sqrt(HS)
//   l = sum 2^(s_j - m),   part = sum 2^(s_j - m) v_j
//
// With M the largest m of a head, its output is sum w part over the splits, w = 2^(m - M) * (1 / sum 2^(m - M) l). The
// last block of a head to finish combines the splits: each block increments `arrived` once its part is visible, and the
// block that completes the count resets it to 0, reads the parts of the others and writes the head to `out`. (Leaving
// this to the kernel that multiplies by w_attn, where every block would do it for all rows, took 13 us per layer with 8
// rows.) The splits are added in order, whichever block is last. Without a sequence (row outside
// 0..B - 1) or a key (position below 0), nothing is written.
//
//   a key's row of the head   [ lane 0 | lane 1 | ... ]   LANES neighbouring lanes, 16 bytes each, PIECES times
//   a warp's keys             32 / LANES at a time, neighbours in memory
//   a thread                  every GROUPS-th key of the split
//
// The kernel is latency-bound: there is little data, and nothing to do until it arrives. Therefore all loads of a
// thread, of K and V, are in flight before the first value is used (AS_VECTORS of each; a split that does not fit takes
// several rounds), and only one barrier separates the warps' sums from the result. The grid is the same for all
// positions, so that it can be captured in a CUDA graph.
//
// Before the previous kernel has ended, the value of position is only a hint. It selects the rows that are prefetched
// into the L2 cache meanwhile, and the rows loaded first after the wait. If the final position differs from the hint,
// the loads are repeated.
//
// The order of additions depends only on HS and T. Grid (S, NH, M), block (AS_THREADS). A position beyond the cache
// counts as its last row.
//
// Source of the idea: Dao et al., "Flash-Decoding for long-context inference" (2023).
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef HS
#define HS 64
#endif
#ifndef AS_KEYS  // keys per block
#define AS_KEYS 128
#endif
#ifndef AS_WIDTH  // elements per load of K and V: a power of two that divides HS, at most 16 bytes; k, v aligned to it
#define AS_WIDTH 4
#endif
#ifndef AS_THREADS
#define AS_THREADS 256
#endif
#ifndef AS_VECTORS  // of K, and of V, that a thread has in flight
#define AS_VECTORS 8
#endif
__device__ constexpr int next_power(int n) { return n <= 1 ? 1 : 2 * next_power((n + 1) / 2); }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

constexpr int ROW = NH * HS;
constexpr int VECTORS = HS / AS_WIDTH;                        // of a key
constexpr int LANES = least(next_power(VECTORS), 32);         // of a warp that share a key
constexpr int PIECES = (VECTORS + LANES - 1) / LANES;         // vectors of a lane
constexpr int GROUPS = AS_THREADS / LANES;                    // keys at a time
constexpr int WARPS = AS_THREADS / 32;
constexpr int SHARE = AS_KEYS / GROUPS;                       // keys of a thread
constexpr int HELD = least(SHARE, AS_VECTORS < PIECES ? 1 : AS_VECTORS / next_power(PIECES));  // of these at a time
constexpr int ROUNDS = SHARE / HELD;
constexpr int AT_ONCE = 8;                                    // splits whose parts a thread loads together
static_assert(NH > 0 && HS > 0 && HS <= 256, "HS: 1 to 256");
static_assert(HS % AS_WIDTH == 0, "a head is whole vectors");
static_assert(AS_THREADS % 32 == 0 && AS_THREADS <= 1024, "a block is whole warps");
static_assert(SHARE * GROUPS == AS_KEYS && HELD * ROUNDS == SHARE, "a thread's keys make whole rounds");
static_assert(HS <= AS_THREADS, "a thread puts together no more than one channel");

typedef Vec<T, AS_WIDTH> Vector;

__device__ __forceinline__ void fetch(const T* from) {  // prefetches into the L2 cache
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
#endif
}

// Forces the value to be computed here. Otherwise the compiler recomputes it at every use, always after the wait.
template <typename Pointer>
__device__ __forceinline__ void keep(Pointer& value) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+l"(value));
#endif
}

// Forces a load to be issued here, and not where its value is used, which would add a memory latency.
__device__ __forceinline__ void keep_loaded(float& value) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(value));
#endif
}

template <typename Op>
__device__ __forceinline__ float across_groups(float value) {  // of a warp; a group's lanes hold different values
#pragma unroll
    for (int distance = 16; distance >= LANES; distance /= 2) {
        value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// Calls use(i, p, n, offset) for a thread's vectors of a round: piece p of the key that is n keys after the thread's
// first one and `offset` elements further.
template <typename Use>
__device__ __forceinline__ void each(int round, int vector, Use use) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int n = (round * HELD + i) * GROUPS;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (VECTORS % LANES && vector + p * LANES >= VECTORS) continue;
            use(i, p, n, (long long)n * ROW + p * LANES * AS_WIDTH);
        }
    }
}

// Whether this block is the last of a head's `count` blocks to arrive. If so, all writes of the others are visible.
__device__ __forceinline__ bool last_to_arrive(int* arrived, int count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == count - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    return last;
}

// Calls put(s, w) with the weight of each of the first `count` splits of at most `most`; stat(s) returns {m, l}. If
// UNROLL is as large as `most`, the values that stat and put access can stay in registers.
template <int UNROLL, typename Stat, typename Put>
__device__ __forceinline__ void weigh(int count, int most, Stat stat, Put put) {
    float largest = -INFINITY, total = 0.0f;
#pragma unroll UNROLL
    for (int s = 0; s < most; ++s) {
        if (s < count) largest = fmaxf(largest, stat(s).x);
    }
#pragma unroll UNROLL
    for (int s = 0; s < most; ++s) {
        if (s < count) total = fmaf(exp2f(stat(s).x - largest), stat(s).y, total);
    }
    const float whole = 1.0f / total;  // computed once: a division takes dozens of instructions
#pragma unroll UNROLL
    for (int s = 0; s < most; ++s) {
        if (s < count) put(s, exp2f(stat(s).x - largest) * whole);
    }
}

// Computes channel threadIdx.x of a head from its first `count` splits. Consecutive parts are ROW floats apart,
// consecutive stats NH. Loads bypass the L1 cache, which may be stale. shared: one element per split.
__device__ __forceinline__ float put_together(const float* part, const float2* stat, int count, float2* shared) {
    const int channel = min((int)threadIdx.x, HS - 1);
    float o[AT_ONCE], sum = 0.0f;
    const auto ask = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) o[i] = __ldcg(part + (long long)min(first + i, count - 1) * ROW + channel);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) keep_loaded(o[i]);
    };
    if (count <= AT_ONCE) {  // one memory latency, no barrier
        float2 found[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) found[s] = __ldcg(stat + (long long)min(s, count - 1) * NH);
        ask(0);
        weigh<AT_ONCE>(
            count, AT_ONCE, [&](int s) { return found[s]; },
            [&](int s, float weight) { sum = fmaf(weight, o[s], sum); });
        return sum;
    }
    ask(0);
#pragma unroll 1
    for (int s = threadIdx.x; s < count; s += AS_THREADS) shared[s] = __ldcg(stat + (long long)s * NH);
    __syncthreads();
    if (threadIdx.x == 0) {  // no other thread needs m now
        weigh<AT_ONCE>(
            count, count, [&](int s) { return shared[s]; }, [&](int s, float weight) { shared[s].x = weight; });
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        if (first > 0) ask(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i < count) sum = fmaf(shared[first + i].x, o[i], sum);
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(AS_THREADS) attention_split(
    const float* q,       // (M, C)
    const T* k,           // (B, n_ctx, C)
    const T* v,           // (B, n_ctx, C)
    const int* row,       // (M): no kernel that can overlap with this one writes it
    const int* position,  // (M)
    float* parts,         // (M, S, NH, HS)
    float* stats,         // (M, S, NH, 2)
    int B, int n_ctx,
    float* out,      // (M, C)
    int* arrived) {  // (M, NH): zeros, before and after
    __shared__ float sums[WARPS][HS], maxima[WARPS], totals[WARPS];
    const int split = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long query = blockIdx.z, b = __ldcg(row + query);
    const int group = threadIdx.x / LANES, vector = threadIdx.x % LANES;
    const int channel = vector * AS_WIDTH, own = split * AS_KEYS + group;  // the thread's first channel and key
    const long long from = (b * n_ctx + own) * ROW + h * HS + channel;
    const T *own_k = k + from, *own_v = v + from;
    const float* own_q = q + query * ROW + h * HS + channel;
    const int* own_position = position + query;
    keep(own_k), keep(own_v), keep(own_q), keep(own_position);

    Vector held_k[HELD][PIECES] = {}, held_v[HELD][PIECES] = {};  // zeros where nothing is loaded
    const auto load_keys = [&](int round, int last) {
        each(round, vector, [&](int i, int p, int n, long long offset) {
            if (own + n <= last) held_k[i][p] = load_fresh<T, AS_WIDTH>(own_k + offset);
        });
        each(round, vector, [&](int i, int p, int n, long long offset) {
            if (own + n <= last) held_v[i][p] = load_fresh<T, AS_WIDTH>(own_v + offset);
        });
    };
    const auto clear = [&]() {
        each(0, vector, [&](int i, int p, int, long long) { held_k[i][p] = held_v[i][p] = {}; });
    };

    const bool cached = b >= 0 && b < B;
    const int hint = cached ? min(*(const volatile int*)own_position, n_ctx - 1) : -1;
    for (int round = 0; round < ROUNDS; ++round) {
        each(round, vector, [&](int, int, int n, long long offset) {
            if (own + n < hint) fetch(own_k + offset), fetch(own_v + offset);
        });
    }
    let_next_start();
    wait_for_previous();
    const int now = cached ? min(__ldcg(own_position), n_ctx - 1) : -1;
    float x[PIECES][AS_WIDTH] = {};
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        if (VECTORS % LANES && vector + p * LANES >= VECTORS) continue;
        load_fresh_floats<AS_WIDTH>(own_q + p * LANES * AS_WIDTH, x[p]);
    }
    float s[HELD];
    const auto multiply = [&]() {  // q times the keys held: a lane's share of each product
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            s[i] = 0.0f;
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                float row[AS_WIDTH];
                held_k[i][p].unpack(row);
#pragma unroll
                for (int e = 0; e < AS_WIDTH; ++e) s[i] += x[p][e] * row[e];
            }
        }
    };
    int last = hint;
    for (;;) {
        load_keys(0, last);
        multiply();
        if (last == now) break;
        last = now;  // the hint was wrong: repeat the loads
        clear();
    }
    if (split * AS_KEYS > last) return;

    const float unit = 1.4426950408889634f / sqrtf((float)HS);  // a constant
    float m = -INFINITY, l = 0.0f, o[PIECES][AS_WIDTH];         // m: of the warp; l, o: of the thread's keys
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < AS_WIDTH; ++e) o[p][e] = 0.0f;
    }
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
        if (round > 0) {
            clear();
            load_keys(round, last);
            multiply();
        }
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const bool seen = own + (round * HELD + i) * GROUPS <= last;
            s[i] = lanes_sum<LANES>(s[i]) * unit;
            if (!seen) s[i] = -INFINITY;
            max = fmaxf(max, s[i]);
        }
        max = fmaxf(m, across_groups<Max>(max));
        const float point = max == -INFINITY ? 0.0f : max;  // exp2(-inf - 0) is 0, exp2(-inf + inf) is NaN
        if (ROUNDS > 1) {
            const float scale = exp2f(m - point);
            l *= scale;
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
#pragma unroll
                for (int e = 0; e < AS_WIDTH; ++e) o[p][e] *= scale;
            }
        }
        m = max;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const float weight = exp2f(s[i] - point);
            l += weight;
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                float row[AS_WIDTH];
                held_v[i][p].unpack(row);
#pragma unroll
                for (int e = 0; e < AS_WIDTH; ++e) o[p][e] += weight * row[e];
            }
        }
    }

    l = across_groups<Sum>(l);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < AS_WIDTH; ++e) {
            const float sum = across_groups<Sum>(o[p][e]);
            if (lane < LANES && vector + p * LANES < VECTORS) sums[warp][channel + p * LANES * AS_WIDTH + e] = sum;
        }
    }
    if (lane == 0) maxima[warp] = m, totals[warp] = l;
    __syncthreads();
    float all = maxima[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) all = fmaxf(all, maxima[w]);
    const float point = all == -INFINITY ? 0.0f : all;
    const long long place = (query * gridDim.x + split) * NH + h;
#pragma unroll 1
    for (int c = threadIdx.x; c < HS; c += AS_THREADS) {
        float sum = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float scale = exp2f(maxima[w] - point);
            sum += scale * sums[w][c];
            total += scale * totals[w];
        }
        parts[place * HS + c] = sum;
        if (c == 0) stats[2 * place] = all, stats[2 * place + 1] = total;
    }

    extern __shared__ float2 of_splits[];
    const int count = last / AS_KEYS + 1;
    const long long head = query * gridDim.x * NH + h;  // its first split
    if (!last_to_arrive(arrived + query * NH + h, count)) return;
    const float sum = put_together(parts + head * HS, reinterpret_cast<const float2*>(stats) + head, count, of_splits);
    if (threadIdx.x < HS) out[query * ROW + h * HS + threadIdx.x] = sum;
}
