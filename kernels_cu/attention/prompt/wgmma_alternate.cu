// Attention on Hopper for few sequences, for heads of 64 channels.
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]    j <= i with ATT_CAUSAL, else the whole sequence
//
//   attention_wgmma_alternate: for few sequences, the same bits as attention_wgmma: two warpgroups process alternate
//       keys for 64 queries, so that the last queries take half as long
//   attention_cached_wgmma_alternate: attention_wgmma_alternate with ATT_CACHED, with the bits of
//       attention_cached_wgmma
//
// Arguments, products and softmax are the same as in attention/prompt/wgmma.cu. In that file a tile is 128 queries: one
// prompt of 1,024 tokens with 12 heads has 96 tiles, and the last tile of a head takes 8 steps of 128 keys, which is
// the time of the whole kernel. In this file a tile is 64 queries, and each warpgroup has its own ring. A warpgroup
// processes every other step, from the last keys that the queries see to the first. At the end the second warpgroup
// passes its sums to the first warpgroup, which adds and stores them:
//
//   first    S7 V7   S5 V5   S3 V3   S1 V1 | add, store    S: scores and softmax of 128 keys, V: product with values
//   second   S6 V6   S4 V4   S2 V2   S0 V0 | pass
//
// Blocks of 64 queries read keys and values from the L2 cache twice as often as blocks of 128, and the next tile does
// not overlap the end of the current tile. Therefore this kernel is faster only if there are few tiles, or one or two
// tiles per sequence. gpt2block/ops/engines/attention_tiles.py estimates the times of both kernels.
//
// Measured: docs/experiments.md#attention_wgmma
//
// map: the tensor map of attention/prompt/wgmma.cu. Block (THREADS), grid: one block per multiprocessor, or per tile if
// there are fewer tiles, dynamic shared memory sizeof(Block) + 1024. Arrays are aligned to 16 bytes.
//
// architecture: sm_90a
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_BF16
#endif
#include "lib/attention/scores.cuh"

constexpr int QUERIES = 64, RINGS = 2;
#include "lib/attention/wgmma_work.cuh"
#include "lib/attention/wgmma_rows.cuh"
#include "lib/attention/wgmma_append.cuh"
static_assert(SIZE == 64, "the keys of a head are two series");

// The sums that the second warpgroup passes to the first.
struct Passed {
    float values[SIZE / 2 + 4][GROUP];
};

struct Block : Shared {
    Passed passed;
};

// Named barriers of this file, numbered after the barriers of lib/attention/wgmma_rows.cuh.
enum { PASS = 6, TAKEN };

__device__ __forceinline__ void produce(Shared& shared, const Source& from, Work work) {
    unsigned count[2] = {0, 0};
    for (int tile = 0; work.next(); ++tile) {
        const auto load = [&](int ring, unsigned number, int part, int step) {
            load_slot(from, work, shared, ring, number, part, step);
        };
        wait(shared.answered[tile % 2], tile / 2 + 1 & 1, "answered");
        load_rows(from, work, shared.queries[tile % 2], shared.asked[tile % 2], 0, work.first);
        const int steps = steps_of(work);
#pragma unroll 1
        for (int i = 0; i < steps + 2; ++i) {  // i counts steps backwards: loads keys of step i, values of step i - 2
            const int ring = i % 2;
            const unsigned number = (ring ? count[1] : count[0]) + i / 2 * 2;
            if (i < steps) load(ring, number - (i >= 2), 1, steps - 1 - i);
            if (i >= 2) load(ring, number - (i >= steps), 2, steps + 1 - i);
        }
        count[0] += (steps + 1) / 2 * 2, count[1] += steps / 2 * 2;
    }
}

// Passes the sums of the second warpgroup to the first.
__device__ __forceinline__ void give(Passed& passed, const Sums& sums) {
    const int thread = threadIdx.x % GROUP;
    sync_threads(TAKEN, CONSUMERS);  // the first warpgroup has read the previous sums
#pragma unroll
    for (int i = 0; i < SIZE / 2; ++i) passed.values[i][thread] = sums.out[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        passed.values[SIZE / 2 + r][thread] = sums.sum[r];
        passed.values[SIZE / 2 + 2 + r][thread] = sums.reference[r];
    }
    pass_threads(PASS, CONSUMERS);
}

__device__ __forceinline__ void take(const Passed& passed, Sums& sums) {
    const int thread = threadIdx.x % GROUP;
    Sums other;
    // This barrier is not needed for correctness: barrier PASS orders the accesses to `passed`. Without it, racecheck
    // reports them as a race if the other warpgroup has passed more of its own barriers than this warpgroup.
    if (WINDOW) sync_threads(1, GROUP);
    sync_threads(PASS, CONSUMERS);
#pragma unroll
    for (int i = 0; i < SIZE / 2; ++i) other.out[i] = passed.values[i][thread];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        other.sum[r] = passed.values[SIZE / 2 + r][thread];
        other.reference[r] = passed.values[SIZE / 2 + 2 + r][thread];
    }
    pass_threads(TAKEN, CONSUMERS);
    sums.divide_with(other);
}

// Computes the warpgroup's steps of a tile: `step`, `step` - 2 and so on. Returns false if a value that only some of
// the queries see is infinite or NaN.
__device__ __forceinline__ bool attend(Consumer& own, Sums& sums, const Work& work, int tile, int step, bool ragged) {
    const int from = (first_step(work) + step) * KEYS;
    const bool last = own.group == 0, in_part = ATT_CAUSAL || (ragged && work.length - from < KEYS);
    const bool seen_in_part = (last && in_part) || is_past(from, work.first + QUERIES - 1);
    bool finite = true;
    sums.clear();
    fence_sums();
    own.ask_for_scores(tile, own.arrived(own.count));
    if (seen_in_part) finite = own.make_finite(own.count + (step > 1 ? 2 : 1));
    wait_for_products<0>();
    pin(own.s);
    own.release_next();
    own.begin(sums, from, work.first, work.length);
#pragma unroll 1
    for (int now = step; now > 1; now -= 2) {
        finite &= own.advance(sums, sums, work, tile, now < step, now - 2, now > 3);
    }
    const Matrix values = own.arrived(own.count);
    fence_sums();
    own.ask_for_out(sums, values, step > 1);
    wait_for_products<0>();
    pin(sums.out);
    own.release_next();
    return finite;
}

__device__ __forceinline__ void consume(Block& shared, Work work, const KV* v, T* out, bool ragged) {
    Consumer own(shared);
    if (own.group == 0) pass_threads(TAKEN, CONSUMERS);  // signals that `passed` is free
    const int C = SIZE * work.n_head;
    for (int tile = 0; work.next(); ++tile) {
        const int last = steps_of(work) - 1, from = (first_step(work) + last) * KEYS, row = work.first + own.row;
        Sums sums;
        bool finite = true;
        wait(shared.asked[tile % 2], tile / 2 & 1, "asked");
        if (last >= own.group) finite = attend(own, sums, work, tile, last - own.group, ragged);
        own.release(shared.answered[tile % 2]);
        const Values values(work, v);
        const int visible_from = WINDOW ? first_step(work) * KEYS : from, end = min(work.length, from + KEYS);
        if (own.group == 1) {
            if (WINDOW && !finite) {
                add_not_finite(sums.out, values.first, values.stride, visible_from, end, row + own.lane / 4);
            }
            if (last > 0) give(shared.passed, sums);
            continue;
        }
        if (last > 0) {
            take(shared.passed, sums);
        } else {
            sums.divide();
        }
        if (!finite) add_not_finite(sums.out, values.first, values.stride, visible_from, end, row + own.lane / 4);
        T* const to = out + (work.row + row) * C + SIZE * work.head;
        own.store(sums, to, C, work.begin - row, work.length - row);
    }
}

// Launched by operation (variant): attention_packed (wgmma_few), attention_queries (wgmma_few)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_cached_wgmma_alternate(
    const __grid_constant__ TensorMap map,    // tensor map of qkv, of which only Q is read
    const __grid_constant__ TensorMap k_map,  // tensor maps of k and v, not used for FP8
    const __grid_constant__ TensorMap v_map,
    const KV* k,            // (B, n_ctx, C / ATT_SERVES)
    const KV* v,            // (B, n_ctx, C / ATT_SERVES)
    const int* cu_seqlens,  // (B + 1), not decreasing
    const int* start,       // (B)
    T* out,                 // (N, C)
    int n_ctx, int N, int B,
    int seq_len,            // length of the longest sequence
    int n_head,
    int together) {         // heads whose tiles run at the same time
    const Work work{cu_seqlens, B, seq_len, n_head, together, (int)blockIdx.x, (int)gridDim.x, start, N, n_ctx};
    run<Block>({map, k_map, v_map, k, v}, work, out, true, [](Work, int) {});
}

// Launched by operation (variant): attention (wgmma_few), attention_varlen (wgmma_few)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_wgmma_alternate(
    const __grid_constant__ TensorMap map,  // tensor map of qkv
    const T* qkv,                           // (rows, W)
    const int* cu_seqlens,                  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out,                                 // (rows, C)
    int B,
    int seq_len,          // length of the longest sequence
    int n_head,
    int together,         // heads whose tiles run at the same time
    const int* row,       // (rows): sequence in the kv_cache; row, position, k and v: null without a kv_cache
    const int* position,  // (rows)
    T* k,                 // (cache_B, n_ctx, C / ATT_SERVES)
    T* v,                 // (cache_B, n_ctx, C / ATT_SERVES)
    int cache_B, int n_ctx) {
    const KV* const rows = reinterpret_cast<const KV*>(qkv);  // without ATT_CACHED, KV is T
    const Work work{cu_seqlens, B, seq_len, n_head, together, (int)blockIdx.x, (int)gridDim.x};
    run<Block>({map, map, map, rows, rows}, work, out, cu_seqlens != nullptr, [&](Work work, int warp) {
        const KvCache cache{row, position, k, v, cache_B, n_ctx};
        while (k && work.next()) append(work, qkv, cache, warp, GROUP / 32 - 1);
    });
}
