// Attention on Hopper, for heads of 64 and 128 channels.
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]    j <= i with ATT_CAUSAL, else the whole sequence
//
//   qkv (rows, W)    a row is [Q | K | V], each with its heads next to each other: Q of C = SIZE n_head channels, K and
//                    V of C / ATT_SERVES; a head of K and V serves ATT_SERVES neighbouring heads of Q
//   out (rows, C)    the rows of all sequences, one sequence after the other
//
//   attention_wgmma: tensor cores (wgmma), 64 queries per warpgroup: one warp copies K and V (TMA), the softmax
//       overlaps the products, each block processes many tiles; ragged batches
//   attention_cached_wgmma: attention_wgmma with ATT_CACHED: the queries of sequence b begin at position start[b]; K
//       and V come from a kv_cache that already contains the queries' keys. A row has the same bits as in
//       attention_wgmma over its whole sequence
//
// A tile is 128 queries of a head, for two warpgroups. The queries are loaded first. Then keys and values are loaded
// into a ring in shared memory, 128 keys at a time, from the last keys that the queries see to the first:
//
//   wgmma     S = Q K^T                       (64, 128) in registers: scores are never stored in memory
//   softmax   P = exp2(S UNIT - reference)    see lib/attention/scores.cuh; lanes add their sums of P at the end
//   wgmma     O = O + P V                     the registers of S have the layout of operand P
//
//   tensor cores   S0            S1 P0 V0      S2 P1 V1     ...   P V of the last keys, S0 of the next tile
//   threads           softmax0      softmax1      softmax2  ...                        out
//
// The bits of a row depend only on its sequence: keys are counted from the start of the sequence, in steps of 128. For
// heads of 64 channels, even and odd steps have separate sums (lib/attention/wgmma_rows.cuh).
// attention/prompt/wgmma_alternate.cu, in which two warpgroups share the keys of a query, therefore computes the same
// bits. Only the step processed first can include keys after a query or after the end of the sequence, and with a
// window (lib/attention/window.cuh) only the last steps include keys before the window. In V of these steps, infinite
// and NaN values are replaced by 0, and added at the end to the rows that see them.
//
// If there is a kv_cache, warps without other work write K and V to it (lib/attention/wgmma_append.cuh).
// lib/attention/wgmma_work.cuh describes which tiles a block processes.
//
// Measured: docs/experiments.md#attention_wgmma
//
// Source of the idea: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision"
// (2024).
//
// map: tensor map of qkv as (B, T, W) or (1, rows, W), in boxes of (1, 128, 64). 128 rows of a head with 64 channels
// are one box, with 128 channels two consecutive boxes. Block (THREADS), grid: one block per multiprocessor, or per
// tile if there are fewer tiles, dynamic shared memory sizeof(Shared) + 1024. Arrays are aligned to 16 bytes. The sums
// need so many registers that the copying warps release most of their registers to the consumer warps.
//
// architecture: sm_90a
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_BF16
#endif
#include "lib/attention/scores.cuh"

constexpr int QUERIES = 128, RINGS = 1, SERIES = SIZE == 64 ? 2 : 1;
#include "lib/attention/wgmma_work.cuh"
#include "lib/attention/wgmma_rows.cuh"
#include "lib/attention/wgmma_append.cuh"
static_assert(QUERIES == GROUPS * GROUP_QUERIES && QUERIES == KEYS,
              "one kind of box, of which one has keys that are later than some of a tile's queries");

__device__ __forceinline__ void produce(Shared& shared, const Source& from, Work work) {
    unsigned count = 0;
    for (int tile = 0; work.next(); ++tile) {
        const auto load = [&](int part, int step) {
            load_slot(from, work, shared, 0, count, part, step);
            ++count;
        };
        wait(shared.answered[tile % 2], tile / 2 + 1 & 1, "answered");
        load_rows(from, work, shared.queries[tile % 2], shared.asked[tile % 2], 0, work.first);
        const int last = steps_of(work) - 1;
        for (int step = last; step >= 0; --step) {
            load(1, step);
            if (step < last) load(2, step + 1);
        }
        load(2, 0);
    }
}

__device__ __forceinline__ void consume(Shared& shared, Work work, const KV* v, T* out, bool ragged) {
    if (!work.next()) return;
    Consumer own(shared);
    Sums sums[SERIES], &even = sums[0], &odd = sums[SERIES - 1];  // even: sums of steps 0, 2, ..; odd: of steps 1, 3
    if (own.group == 1) own.pass_turn();
    const int C = SIZE * work.n_head;
    bool more = true;
    const auto ask_for_first = [&](int tile) {  // starts Q K^T for a tile's first keys (unused after the last tile)
        if (more) wait(shared.asked[tile % 2], tile / 2 & 1, "asked");
        own.ask_for_scores(tile, more ? own.arrived(own.count) : own.first_slot);
    };
    own.take_turn();
    fence_sums();
    ask_for_first(0);
    own.pass_turn();
#pragma unroll 1
    for (int tile = 0; more; ++tile) {
        const int last = steps_of(work) - 1, from = (first_step(work) + last) * KEYS;  // from: first key of step `last`
        const int row = work.first + own.row;                     // the warp's first row
        bool finite = true;
        if (ATT_CAUSAL || (ragged && work.length - from < KEYS)) {
            finite = own.make_finite(own.count + (last > 0 ? 2 : 1));
        }
        even.clear(), odd.clear();
        wait_for_products<0>();
        pin(own.s);
        own.release_next();
        own.begin(even, from, work.first, work.length);
        if (SERIES > 1 && last % 2) {
#pragma unroll
            for (int r = 0; r < 2; ++r) odd.sum[r] = even.sum[r], odd.reference[r] = even.reference[r];
            even.clear();
        }
#pragma unroll 1
        for (int step = last; step > 0; step = SERIES > 1 ? step - 1 & ~1 : step - 1) {
            const int next = step - 1 & ~1;
            if (SERIES == 1 || step % 2 == 0) {
                finite &= own.advance(even, odd, work, tile, step + SERIES <= last, step - 1, step > 1);
            }
            if (SERIES > 1) finite &= own.advance(odd, even, work, tile, step < last, next, next > 0);
        }
        own.release(shared.answered[tile % 2]);
        T* const to = out + (work.row + row) * C + SIZE * work.head;
        const Values values(work, v);
        const int before = work.begin - row, left = work.length - row, end = min(work.length, from + KEYS);
        const int visible_from = WINDOW ? first_step(work) * KEYS : from;
        more = work.next();
        const unsigned number = own.count++;
        const Matrix last_values = own.arrived(number);
        own.take_turn();
        fence_sums();
        own.ask_for_out(even, last_values, SERIES <= last);
        ask_for_first(tile + 1);
        own.pass_turn();
        wait_for_products<1>();
        pin(even.out);
        own.release(shared.empty[0][number % SLOTS]);
        if (SERIES > 1 && last > 0) {
            even.divide_with(odd);
        } else {
            even.divide();
        }
        if (!finite) add_not_finite(even.out, values.first, values.stride, visible_from, end, row + own.lane / 4);
        own.store(even, to, C, before, left);
    }
    wait_for_products<0>();
}

// Launched by operation (variant): attention_packed (wgmma), attention_queries (wgmma)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_cached_wgmma(
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
    run<Shared>({map, k_map, v_map, k, v}, work, out, true, [](Work, int) {});
}

// Launched by operation (variant): attention (wgmma), attention_varlen (wgmma)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_wgmma(
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
    run<Shared>({map, map, map, rows, rows}, work, out, cu_seqlens != nullptr, [&](Work work, int warp) {
        const KvCache cache{row, position, k, v, cache_B, n_ctx};
        while (k && work.next()) append(work, qkv, cache, warp, GROUP / 32 - 1);
    });
}
