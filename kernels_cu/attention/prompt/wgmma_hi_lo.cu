// Attention on Hopper for heads of 64 channels, with float32 accuracy: each matrix is two float16 matrices, hi and lo.
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]     j <= i with ATT_CAUSAL, else all j
//
// attention/prompt/mma_hi_lo.cu describes matrices, scales, weights, ATT_ONE_SCALE, and how infinite and NaN values
// are treated. attention/prompt/wgmma.cu describes copies by TMA into a ring.
//
//   parts (2, rows, W)       hi, then lo; a row is [Q | K | V], and scale (rows) applies to its Q, K and V
//   out_parts (2, rows, C)   the rows of all sequences, one sequence after the other
//   out_scale (rows)         the largest scale of the rows that row i sees
//
//   attention_fp32_wgmma: float32 accuracy by wgmma: two warpgroups take alternate keys of 64 queries, copied by TMA
//
// A tile is 64 keys; tiles are processed from the last keys that the queries see to the first. Two warpgroups halve the
// time of a sequence's last queries, which see the most keys. The second group passes its sums to the first at the end.
//
//   wgmma     S = Q K^T    hi hi in one accumulator, hi lo + lo hi in a second accumulator; Q hi is in registers
//   softmax   P = exp2(S UNIT - reference), divided into two parts in the registers of operand P
//   wgmma     O = P V      of one tile, also in two accumulators
//   threads   sums += O    in float, because tensor cores truncate their sums
//
// The warpgroups take turns: each issues the products P V of one tile and Q K^T of its next tile together. While the
// products of one warpgroup run, the other warpgroup computes its softmax:
//
//   tensor cores   S0   S0'  V0 S1   V0' S1'   V1 S2   V1' S2'  ...    S0': S0 of the second warpgroup
//   first               softmax0     +     softmax1    +     softmax2
//   second                   softmax0'     +     softmax1'   +     softmax2'
//
// The bits of a row depend only on the rows that it sees: keys are counted from the start of the sequence, and
// alternate tiles form two series, whichever warpgroup computes them. Only a warpgroup's first tile can include keys
// after a query or the end of the sequence, and only its last tiles keys before a window (lib/attention/window.cuh). In
// V of these tiles, infinite and NaN values are replaced by 0, and added at the end to the rows that see them.
//
// map: tensor map of `parts`, in boxes of (1, 64, 64). Block (THREADS), grid: one block per multiprocessor, or per tile
// of QUERIES if there are fewer tiles (lib/attention/wgmma_work.cuh); dynamic shared memory sizeof(Shared) + 1024.
// Arrays are aligned to 16 bytes.
//
// architecture: sm_90a
#define STORAGE_FP16 1
#include "lib/common.cuh"
#include "lib/fast.cuh"
#include "lib/hi_lo.cuh"
#include "lib/sm80.cuh"
#include "lib/sm90_wgmma.cuh"

#include "lib/attention/scores.cuh"
#include "lib/attention/hi_lo_rows.cuh"
#include "attention/prompt/wgmma_hi_lo_copies.cuh"

struct Consumer : Rows {
    Shared& shared;
    const int group, thread, warp, lane;  // indices: group in the block, thread and warp in the group, lane in the warp
    const Matrix first_slot;
    unsigned count = 0;  // number of ring slots that the group has used so far

    float s[KEYS / 2], s_cross[KEYS / 2];  // scores: hi hi; hi lo + lo hi
    float o[SIZE / 2], o_cross[SIZE / 2];  // P V of a tile: hi hi; hi lo + lo hi
    unsigned asked[SIZE / 16][4];          // high parts of the queries
    unsigned p[KEYS / 16][4], q[KEYS / 16][4];  // p: hi of P; q: lo of P
    float of_key[KEYS / 8][2];                  // scales of the keys

    __device__ __forceinline__ Consumer(Shared& shared)
        : shared(shared), group(uniform(threadIdx.x / GROUP)), thread(threadIdx.x % GROUP), warp(uniform(thread / 32)),
          lane(threadIdx.x % 32), first_slot(matrix_at(shared.rings[group].slots[0], PART)) {}

    __device__ __forceinline__ void take_turn() const { sync_threads(TURN + group, CONSUMERS); }
    __device__ __forceinline__ void pass_turn() const { pass_threads(TURN + (group ^ 1), CONSUMERS); }

    __device__ __forceinline__ Matrix arrived(unsigned number) const {
        const unsigned slot = number % SLOTS;
        wait(shared.full[group][slot], number / SLOTS & 1, "full");
        return further(first_slot, slot * SLOT);
    }

    __device__ __forceinline__ void release(unsigned number) const {
        if (lane == 0) arrive(shared.empty[group][number % SLOTS]);
    }

    // Starts a tile of queries: loads the high parts of the queries from a buffer, and their scales. `left`: number of
    // rows from the warp's first row to the end of the sequence.
    __device__ __forceinline__ void start(const char* queries, const float* scale, int left) {
        const int place = shared_address(queries), row = 16 * warp + lane % 16;
#pragma unroll
        for (int k = 0; k < SIZE / 16; ++k) {
            const int at = place + swizzled(row * LINE + 32 * k + lane / 16 * 16);
            load_matrices(asked[k][0], asked[k][1], asked[k][2], asked[k][3], at);
        }
        clear(scale, left);
    }

    __device__ __forceinline__ void ask_for_scores(Matrix queries, Matrix keys) {
#pragma unroll
        for (int k = 0; k < SIZE / 16; ++k) {
            multiply(s_cross, asked[k], further(keys, PART + 32 * k), k > 0);
            multiply(s, asked[k], further(keys, 32 * k), k > 0);
            multiply(s_cross, further(queries, PART + 32 * k), further(keys, 32 * k), true);
        }
        end_products();
    }

    __device__ __forceinline__ void ask_for_out(Matrix values) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            const Matrix high = further(values, 16 * LINE * k), low = further(values, PART + 16 * LINE * k);
            multiply<true>(o_cross, p[k], low, k > 0);
            multiply<true>(o, p[k], high, k > 0);
            multiply<true>(o_cross, q[k], high, true);
        }
        end_products();
    }

    __device__ __forceinline__ void add_out() {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) out[i / 4][i % 4] += fmaf(o_cross[i], CROSS, o[i]);
    }

    // Replaces the scores of a tile by P in two parts. MASKED and last: see Rows.
    template <bool MASKED>
    __device__ __forceinline__ void soften(int last) {
        Rows::soften<MASKED>(s, s_cross, of_key, p, q, last);
    }

    // Passes the sums of the second group to the first.
    __device__ __forceinline__ void give() const {
        sync_threads(TAKEN, CONSUMERS);  // the first group has read the previous sums
        Rows::give<GROUP>(shared.passed[0] + thread);
        pass_threads(PASS, CONSUMERS);
    }

    // Adds the passed sums to the sums of this group.
    __device__ __forceinline__ void add_given() {
        if (WINDOW) sync_threads(CHECK, GROUP);  // not needed for correctness: see wgmma_alternate.cu
        sync_threads(PASS, CONSUMERS);
        Rows::add_given<GROUP>(shared.passed[0] + thread);
        pass_threads(TAKEN, CONSUMERS);
    }
};

// Replaces infinite and NaN values of a slot by 0. Returns true if all values were finite.
__device__ __forceinline__ bool make_finite(Consumer& own, unsigned number) {
    char* const values = own.shared.rings[own.group].slots[number % SLOTS];
    own.arrived(number);
    if (all_finite(values, CHECK + own.group)) return true;
    remove_not_finite<GROUP>(values);
    sync_threads(CHECK + own.group, GROUP);
    return false;
}

// Computes the group's part for a tile of queries: every second tile of `tiles` tiles of keys. `key`: the group's first
// key; `there`: keys from `key` to the end of the sequence; `first`: the block's first query; `scale`: address of the
// scale of the sequence's first row. Returns false if a value that only some queries see is infinite or NaN.
__device__ __forceinline__ bool attend(Consumer& own, const char* queries, const float* scale, int there, int first,
                                       int tiles, int key) {
    const int steps = (tiles + 1 - own.group) / 2;
    const Matrix asked = matrix_at(queries, PART);
    const int end = first + QUERIES - 1;  // the tile's last query
    bool finite = true;
    fence_sums();
    own.ask_for_scores(asked, own.arrived(own.count));
    load_scales(own.of_key, scale + key, there);
    wait_for_products<0>();
    pin(own.s), pin(own.s_cross);
    own.release(own.count++);
    if ((ATT_CAUSAL ? key + KEYS > first : there < KEYS) || is_past(key, end)) {
        finite = make_finite(own, own.count + (steps > 1));
    }
    own.soften<true>(ATT_CAUSAL ? first + 16 * own.warp - key : there - 1);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
        const unsigned number = own.count;
        own.count += 2;
        const Matrix keys = own.arrived(number), values = own.arrived(number + 1);
        own.take_turn();
        fence_sums();
        own.ask_for_out(values);
        own.ask_for_scores(asked, keys);
        own.pass_turn();
        wait_for_products<1>();
        pin(own.o), pin(own.o_cross);
        own.release(number + 1);
        own.add_out();
        key -= 2 * KEYS;
        load_scales(own.of_key, scale + key, KEYS);
        wait_for_products<0>();
        pin(own.s), pin(own.s_cross);
        own.release(number);
        own.soften<(WINDOW > 0)>(first + 16 * own.warp - key);
        if (is_past(key, end)) finite = make_finite(own, own.count + (step + 1 < steps)) && finite;
    }
    const bool one_more = own.group > 0 && tiles % 2 > 0;  // group 0 has one more tile; group 1 takes an extra turn
    const Matrix last = own.arrived(own.count);
    if (one_more) own.take_turn();
    fence_sums();
    own.ask_for_out(last);
    if (one_more) own.pass_turn();
    wait_for_products<0>();
    pin(own.o), pin(own.o_cross);
    own.release(own.count++);
    own.add_out();
    return finite;
}

__device__ __forceinline__ void consume(Shared& shared, Work work, const T* parts, const float* scale, T* out_parts,
                                        float* out_scale, long long rows) {
    Consumer own(shared);
    pass_threads(own.group == 0 ? TAKEN : TURN, CONSUMERS);  // signals: `passed` is free; the first group may begin
    const int C = SIZE * work.n_head, KV = C / ATT_SERVES;
    const long long stride = C + 2 * KV;
    for (int tile = 0; work.next(); ++tile) {
        const int tiles = tiles_of(work);
        const int first = work.first, row = first + 16 * own.warp, left = work.length - row;
        wait(shared.asked[tile % 2], tile / 2 & 1, "asked");
        if (tiles > own.group) {
            const char* const queries = shared.queries[tile % 2];
            const float* const scales = scale + work.row;
            const int key = (first_tile(work) + tiles - 1 - own.group) * KEYS, there = work.length - key;
            own.start(queries, left > 0 ? scales + row : scales, left);
            if (!attend(own, queries, scales, there, first, tiles, key)) {
                const T* const values = parts + work.row * stride + C + KV + SIZE * (work.head / ATT_SERVES);
                const int from = WINDOW ? first_tile(work) * KEYS : key;
                add_not_finite(own.out[0], values, stride, from, key + min(there, KEYS), row + own.lane / 4);
            }
        }
        if (own.lane == 0) arrive(shared.answered[tile % 2]);
        if (own.group > 0) {
            if (tiles > 1) own.give();
            continue;
        }
        if (tiles > 1) own.add_given();
        const long long to = work.row + row;
        own.store_scales(work.head == 0 ? out_scale + to : nullptr, __ldcg(scale), left);
        own.store(out_parts + to * C + SIZE * work.head, rows * C, C, left);
    }
}

// Launched by operation (variant): attention (wgmma_fp32), attention_varlen (wgmma_fp32)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_fp32_wgmma(
    const __grid_constant__ TensorMap map,  // tensor map of parts
    const T* parts,                         // (2, rows, W)
    const float* scale,                     // (rows), powers of two from 2^-126 to 2^126
    const int* cu_seqlens,                  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out_parts,                           // (2, rows, C)
    float* out_scale,                       // (rows)
    long long rows, int B,
    int seq_len,     // length of the longest sequence
    int n_head,
    int together) {  // heads whose tiles run at the same time
    Shared& shared = start_block<Shared>(map);
    const Work work{cu_seqlens, B, seq_len, n_head, together, (int)blockIdx.x, (int)gridDim.x};
    if (uniform(threadIdx.x / GROUP) == 2) {
        give_registers<24>();
        if (uniform(threadIdx.x / 32) == CONSUMERS / 32 && elect_one()) produce(shared, map, work);
        __syncwarp();
    } else {
        take_registers<240>();
        consume(shared, work, parts, scale, out_parts, out_scale, rows);
    }
}
