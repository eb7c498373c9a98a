// The part that attention/prompt/wgmma.cu and attention/prompt/wgmma_alternate.cu share: a warpgroup's queries,
// products and softmax. The including file defines QUERIES (queries per tile) and RINGS, and includes
// lib/attention/scores.cuh and lib/attention/wgmma_work.cuh.
//
// A warpgroup has 64 queries. The keys that they see are divided into steps of 128, counted from the start of the
// sequence. Even and odd steps form two series, each with separate sums and a separate reference (the offset in the
// exponent of softmax). The result of a row is the sum of both series. The bits of the result are therefore the same
// whether one warpgroup computes both series (RINGS 1: one ring buffer for K and V) or each of two warpgroups computes
// one series (RINGS 2). Heads of 128 channels have one series, because the sums of two series do not fit into
// registers.
#pragma once

#include "lib/fast.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/sm90_wgmma.cuh"

constexpr int KEYS = 128, GROUP_QUERIES = 64, GROUPS = 2, GROUP = 128, CONSUMERS = GROUPS * GROUP;
constexpr int THREADS = CONSUMERS + GROUP, COPIER = CONSUMERS / 32;  // COPIER: index of the copying warp
constexpr int ROW_BYTES = 2 * SIZE, SLOT = KEYS * ROW_BYTES;
constexpr int LINE = 128, BOX = KEYS * LINE, BOXES = SIZE / 64;  // LINE: bytes per row of a BOX-byte TMA box
constexpr int SLOTS = (SIZE == 64 ? 8 : 4) / RINGS;              // slots per ring; a slot holds 128 rows of K or V
constexpr bool TURNS = RINGS == 1;                               // true: the warpgroups issue their products in turn
constexpr int SHARERS = RINGS == 1 ? CONSUMERS : GROUP;          // threads that read a ring
constexpr bool WIDENS = sizeof(KV) < sizeof(T);                  // true: K and V are FP8, loaded by all copying warps
static_assert((SLOTS & (SLOTS - 1)) == 0, "slots are counted without a division");

struct Shared {
    char slots[RINGS][SLOTS][SLOT];  // filled with K of step 0, K of step 1, V of step 0, K of step 2, V of step 1, ...
    char queries[2][SLOT];
    char out[CONSUMERS / 32][16 * ROW_BYTES];
    Barrier full[RINGS][SLOTS], empty[RINGS][SLOTS];
    Barrier asked[2], answered[2];  // asked: queries have arrived; answered: queries have been read

    __device__ __forceinline__ void start() {  // called by one thread
        for (int i = 0; i < RINGS; ++i) {
            for (int j = 0; j < SLOTS; ++j) init(full[i][j], WIDENS ? GROUP : 1), init(empty[i][j], SHARERS / 32);
        }
        for (int i = 0; i < 2; ++i) init(asked[i], 1), init(answered[i], CONSUMERS / 32);
        fence_inits();
    }
};

// first_step() returns the first step (128 keys) that a tile's queries see; with two series, an odd step is replaced by
// the even step before it. steps_of() returns the number of steps from first_step() to the last visible step.
__device__ __forceinline__ int first_step(const Work& work) {
    return first_seen(work.first) / KEYS & (SIZE == 64 ? ~1 : ~0);
}
__device__ __forceinline__ int steps_of(const Work& work) {
    return ((ATT_CAUSAL ? min(work.length, work.first + QUERIES) : work.length) - 1) / KEYS + 1 - first_step(work);
}

#include "lib/attention/wgmma_slots.cuh"
#include "lib/attention/wgmma_copies.cuh"

// The sums over the keys of one series. Lane 4 g + t holds sums of rows g and g + 8.
struct Sums {
    float out[SIZE / 2];         // undefined before the first product
    float sum[2], reference[2];  // sum: sum of P over the lane's keys

    __device__ __forceinline__ void clear() {
        sum[0] = sum[1] = 0.0f;
        reference[0] = reference[1] = -INFINITY;
    }

    __device__ __forceinline__ void scale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) out[i] *= factor[i / 2 % 2];
    }

    // Replaces the first COUNT of the lane's scores s by P (lib/attention/scores.cuh), as floats. No query sees the
    // keys of the other scores. Returns true if the reference of any row of the warp has changed. The caller must then
    // multiply `out` by `factor`.
    template <int COUNT>
    __device__ __forceinline__ bool soften(float (&s)[KEYS / 2], float (&factor)[2]) {
        float base[2];
        bool moves = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
            for (int i = 4; i < COUNT; i += 4) {
                largest[0] = fmaxf(largest[0], s[i + 2 * r]), largest[1] = fmaxf(largest[1], s[i + 2 * r + 1]);
            }
            const float old = reference[r];
            const float next = fmaf(lanes_max<4>(fmaxf(largest[0], largest[1])), UNIT, -BELOW);
            const bool passes = next > old + (AT_MOST - BELOW);  // false if all scores are -inf
            factor[r] = passes ? exp2_fast(old - next) : 1.0f;
            reference[r] = passes ? next : old;
            base[r] = reference[r] == -INFINITY ? 0.0f : -reference[r];  // avoid +inf: -inf + inf is NaN
            moves |= passes;
        }
        moves = __any_sync(0xffffffffu, moves);
        if (moves) sum[0] = __fmul_rn(sum[0], factor[0]), sum[1] = __fmul_rn(sum[1], factor[1]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            s[i] = exp2_fast(fmaf(s[i], UNIT, base[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
        }
        return moves;
    }

    // Divides each row of `out` by the row's sum of P.
    __device__ __forceinline__ void divide() {
        scale({__fdividef(1.0f, lanes_sum<4>(sum[0])), __fdividef(1.0f, lanes_sum<4>(sum[1]))});
    }

    // Adds the sums of the other series to this series, and divides each row of `out` by the row's sum of P. Exchanging
    // the two series does not change the bits of the result.
    __device__ __forceinline__ void divide_with(const Sums& other) {
        float own[2], others[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float both = fmaxf(reference[r], other.reference[r]);
            const float point = both == -INFINITY ? 0.0f : both;  // exp2(-inf) is 0, but exp2(-inf + inf) is NaN
            own[r] = exp2_fast(reference[r] - point);
            others[r] = exp2_fast(other.reference[r] - point);
            const float all = lanes_sum<4>(__fmul_rn(sum[r], own[r]) + __fmul_rn(other.sum[r], others[r]));
            const float factor = __fdividef(1.0f, all);
            own[r] *= factor, others[r] *= factor;
        }
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) {
            out[i] = __fmul_rn(out[i], own[i / 2 % 2]) + __fmul_rn(other.out[i], others[i / 2 % 2]);
        }
    }
};

struct Consumer {
    Shared& shared;
    const int group, warp, lane;           // indices: group and warp in the block, lane in the warp
    const int ring, row;                   // index of the group's ring; the warp's first row in the tile
    const Matrix first_slot, first_query;  // first slot and queries of the group
    unsigned count = 0;                    // slots of the ring used so far

    float s[KEYS / 2];  // scores
    unsigned p[KEYS / 16][4];

    __device__ __forceinline__ Consumer(Shared& shared)
        : shared(shared), group(uniform(threadIdx.x / GROUP)), warp(uniform(threadIdx.x / 32)), lane(threadIdx.x % 32),
          ring(RINGS == 1 ? 0 : group), row(16 * (RINGS == 1 ? warp : warp % 4)),
          first_slot(matrix_at(shared.slots[ring][0], BOXES > 1 ? BOX : 16)),
          first_query(matrix_at(shared.queries[0] + row / GROUP_QUERIES * GROUP_QUERIES * LINE)) {}

    __device__ __forceinline__ void take_turn() const {
        if (TURNS) sync_threads(4 + group, CONSUMERS);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) pass_threads(4 + (group ^ 1), CONSUMERS);
    }

    __device__ __forceinline__ Matrix arrived(unsigned number) const {
        wait(shared.full[ring][number % SLOTS], number / SLOTS & 1, "full");
        return further(first_slot, number % SLOTS * SLOT);
    }

    __device__ __forceinline__ void release(Barrier& barrier) const {
        if (lane == 0) arrive(barrier);
    }
    __device__ __forceinline__ void release_next() { release(shared.empty[ring][count++ % SLOTS]); }

    // Contains a conditional store whose condition is never true. The compiler keeps this store after the softmax and
    // before the code that follows. Otherwise the compiler would move the wait for P V before the softmax, and the
    // product P V would not overlap with the softmax.
    __device__ __forceinline__ void hold(const Sums& to) const {
        asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(
                         to.sum[0] + to.sum[1]),
                     "r"(shared_address(shared.out[0]))
                     : "memory");
    }

    __device__ __forceinline__ void ask_for_scores(int tile, Matrix keys) {
        const Matrix queries = further(first_query, tile % 2 * SLOT);
#pragma unroll
        for (int i = 0; i < SIZE / 16; ++i) {
            const int at = i / 4 * BOX + i % 4 * 32;
            multiply(s, further(queries, at), further(keys, at), i > 0);
        }
        end_products();
    }

    // Issues the product P V. adds: whether P V is added to `to.out`; otherwise P V replaces `to.out`.
    __device__ __forceinline__ void ask_for_out(Sums& to, Matrix values, bool adds) const {
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) multiply<true>(to.out, p[i], further(values, 16 * LINE * i), adds || i > 0);
        end_products();
    }

    // Processes one step: issues P V of the previous step for the sums `pending`, and computes the scores and the
    // softmax of step `step` of the tile for the sums `next`. adds: as in ask_for_out(). more: whether another step
    // follows. Returns false if a value of V that a window hides from some queries is infinite or NaN.
    __device__ __forceinline__ bool advance(Sums& pending, Sums& next, const Work& work, int tile, bool adds, int step,
                                            bool more) {
        const int from = (first_step(work) + step) * KEYS;
        float factor[2];
        const Matrix keys = arrived(count);
        take_turn();
        fence_sums();
        ask_for_scores(tile, keys);
        ask_for_out(pending, arrived(count + 1), adds);
        pass_turn();
        wait_for_products<1>();
        pin(s);
        release_next();
        hide_past(from, work.first);
        const bool moves = next.soften<KEYS / 2>(s, factor);
        hold(next);
        wait_for_products<0>();
        pin(pending.out);
        release_next();
        if (moves) next.scale(factor);
        pack<KEYS / 2>();
        return !is_past(from, work.first + QUERIES - 1) || make_finite(count + more);
    }

    // Computes the softmax of the first scores that a tile computes, for the 128 keys starting at `from`. Masks keys
    // after the end of the sequence and, with a causal mask, keys after the query. first: the tile's first query.
    __device__ __forceinline__ void begin(Sums& sums, int from, int first, int length) {
        float factor[2];
        const int last = first + row + lane / 4 - from - 2 * (lane % 4), left = length - from;
        hide_past(from, first);
        if (ATT_CAUSAL && first + row / GROUP_QUERIES * GROUP_QUERIES == from) {
            mask<0, KEYS / 4>(last, 8);
            sums.soften<KEYS / 4>(s, factor);
            pack<KEYS / 4>();
        } else {
            if (ATT_CAUSAL) {
                mask<KEYS / 4, KEYS / 2>(last - GROUP_QUERIES, 8);
            } else if (left < KEYS) {
                mask<0, KEYS / 2>(left - 1 - 2 * (lane % 4), 0);
            }
            sums.soften<KEYS / 2>(s, factor);
            pack<KEYS / 2>();
        }
    }

    // Masks, among the 128 keys starting at `from`, the keys that precede the window of the lane's queries.
    __device__ __forceinline__ void hide_past(int from, int first) {
        if (!is_past(from, first + row / GROUP_QUERIES * GROUP_QUERIES + GROUP_QUERIES - 1)) return;
        const int last = first + row + lane / 4 - from - 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            if (is_past(i / 4 * 8 + i % 2, last + (i & 2 ? 8 : 0))) s[i] = -INFINITY;
        }
    }

    // Masks each of the lane's scores FROM to TO - 1 whose key comes after key `last`, or in row g + 8 after key `last`
    // + `later`. Keys are counted from the key of score FROM.
    template <int FROM, int TO>
    __device__ __forceinline__ void mask(int last, int later) {
#pragma unroll
        for (int i = FROM; i < TO; ++i) {
            if ((i - FROM) / 4 * 8 + i % 2 > last + (i & 2 ? later : 0)) s[i] = -INFINITY;
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = 2 * i < COUNT ? pack2(s[2 * i], s[2 * i + 1]) : 0;
    }

    // Replaces infinite and NaN values of V in a slot by 0. Returns true if all values were finite. Each warpgroup that
    // reads the slot checks the whole slot before any value is changed.
    __device__ __forceinline__ bool make_finite(unsigned number) {
        arrived(number);
        char* const values = shared.slots[ring][number % SLOTS];
        if (all_finite(values, 1 + group)) return true;
        sync_threads(3 + ring, SHARERS);
        remove_not_finite<SHARERS>(values);
        sync_threads(3 + ring, SHARERS);
        return false;
    }

    // Stores the warp's 16 rows at `to`, except rows from `left` on and, with ATT_CACHED, the rows before `before`:
    // these rows belong to no query.
    __device__ __forceinline__ void store(const Sums& sums, T* to, long long stride, int before, int left) {
        const int place = shared_address(shared.out[warp]);
        __syncwarp();  // all lanes have read the previous rows
#pragma unroll
        for (int i = 0; i < SIZE / 2; i += 8) {  // 16 columns per iteration
            unsigned y[4];                       // y[j]: 8 rows from 8 (j % 2) on, 8 columns from 8 (j / 2) on
#pragma unroll
            for (int j = 0; j < 4; ++j) y[j] = pack2(sums.out[i + 2 * j], sums.out[i + 2 * j + 1]);
            store_matrices(swizzled(place + lane % 16 * ROW_BYTES + lane / 16 * 16 + 4 * i), y[0], y[1], y[2], y[3]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * ROW_BYTES; i += 32 * 16) {
            const int at = i + 16 * lane, row = at / ROW_BYTES;
            const uint4 unit = *reinterpret_cast<const uint4*>(shared.out[warp] + swizzled(at));
            if (CACHED && row < before) continue;
            if (row < left) *reinterpret_cast<uint4*>(to + row * stride + at % ROW_BYTES / 2) = unit;
        }
    }
};

// With one ring, a warpgroup has the sums of both series, and takes registers of the copying warps.
constexpr int CONSUMER_REGISTERS = WIDENS ? 216 : 232, PRODUCER_REGISTERS = WIDENS ? 72 : 40;
static_assert(GROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (GROUPS + 1) * 168, "a block would wait forever");

// The body of a kernel, with shared memory of type Memory. The including file has the functions produce(), which
// requests all copies, and consume(), which computes outputs. others(work, i) is the work of copying warps other than
// the first one, if the TMA copies; i: index of such a warp.
template <typename Memory, typename Others>
__device__ __forceinline__ void run(const Source& from, Work work, T* out, bool ragged, Others others) {
    Memory& shared = start_block<Memory>(from.map);
    const int warp = uniform(threadIdx.x / 32);
    if (warp < COPIER) {
        if (RINGS == 1) take_registers<CONSUMER_REGISTERS>();
        consume(shared, work, from.v, out, ragged);
        return;
    }
    if (RINGS == 1) give_registers<PRODUCER_REGISTERS>();
    if (WIDENS) {
        produce(shared, from, work);
    } else if (warp == COPIER) {
        if (elect_one()) produce(shared, from, work);
        __syncwarp();
    } else {
        others(work, warp - COPIER - 1);
    }
}
