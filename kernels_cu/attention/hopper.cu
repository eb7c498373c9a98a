// Attention on Hopper, for heads of 64 and 128 channels: TMA, wgmma, warp specialisation, a persistent grid.
//
//   out[i] = sum over j of softmax_j(q[i] . k[j] / sqrt(SIZE)) v[j]    j <= i with ATT_CAUSAL, else all of the sequence
//
//   qkv (rows, W)    a row is [Q | K | V], Q of C = SIZE n_head channels, K and V of C / ATT_SERVES, with the heads
//                    packed next to each other in each; a head of K and V serves ATT_SERVES neighbouring heads of Q
//   out (rows, C)    the rows of all sequences, one sequence after the other
//
// A tile is 128 queries of a head. One warp has the copy engine load its queries and then keys and values, 128 at a
// time from the last keys seen to the first, into a ring in shared memory. Two warpgroups have 64 queries each:
//
//   wgmma     S = Q K^T                       (64, 128) in registers: scores are never stored in memory
//   softmax   P = exp2(S UNIT - reference)    attention/scores.cuh; the sum of a row's P is combined at the end
//   wgmma     O = O + P V                     the registers of S have the layout of operand P
//
//   tensor cores   S0            S1 P0 V0      S2 P1 V1     ...   P V of the last keys, S0 of the next tile
//   threads           softmax0      softmax1      softmax2  ...                        out
//
// The bits of a row depend only on its sequence: keys are counted from its start, 128 at a time. Only the 128 keys that
// are processed first can include keys after a query or past the end. Values of these V that are not finite are
// removed, and added at the end to the rows that see them.
//
// attention/hopper_work.cuh describes which tiles a block takes.
//
// On an NVIDIA H200, B = 8, T = 1024, 12 heads, bfloat16: 61.8 us, causal 42.2 (cuDNN 63.1 and 47.3). 512 tokens with
// 32 heads of 128, causal, float16: 14.1 us (attention/mma.cu 26.3).
//
// Source of the idea: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision"
// (2024).
//
// map: qkv as (B, T, W), or (1, rows, W), boxes (1, 128, 64); 128 rows of a head are one box, or two, one after the
// other. Block (THREADS), grid: one block per multiprocessor, or per tile if that is fewer, dynamic shared memory
// sizeof(Shared) + 1024. qkv and out are aligned to 16 bytes. With 128 channels the sums take so many registers that
// the copying warp is in a warpgroup of its own, which leaves its registers to the others.
//
// architecture: sm_90a
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16)
#define STORAGE_BF16
#endif
#include "attention/scores.cuh"
#include "lib/fast.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/sm90_wgmma.cuh"

#ifndef ATT_CAUSAL
#define ATT_CAUSAL 1
#endif
#ifndef ATT_SLOTS  // of the ring
#define ATT_SLOTS (SIZE == 64 ? 8 : 4)
#endif
#ifndef ATT_TURNS  // 1: the warpgroups issue their products in turn
#define ATT_TURNS 1
#endif

constexpr int QUERIES = 128, KEYS = 128, GROUP_QUERIES = 64, GROUPS = 2;
#include "attention/hopper_work.cuh"
constexpr int GROUP = 128, CONSUMERS = GROUPS * GROUP;
constexpr bool TIGHT = SIZE > 64;  // registers
constexpr int THREADS = CONSUMERS + (TIGHT ? GROUP : 32);
constexpr int ROW_BYTES = 2 * SIZE, SLOT = KEYS * ROW_BYTES;
constexpr int LINE = 128, BOX = KEYS * LINE, BOXES = SIZE / 64;  // bytes of a row in a box, and of a box
static_assert(QUERIES == GROUPS * GROUP_QUERIES && QUERIES == KEYS,
              "one kind of box, of which one has keys that are later than some of a tile's queries");
static_assert((ATT_SLOTS & (ATT_SLOTS - 1)) == 0, "slots are counted without a division");

struct Shared {
    char slots[ATT_SLOTS][SLOT];  // K, then in turn K V, then V
    char queries[2][SLOT];
    char out[CONSUMERS / 32][16 * ROW_BYTES];
    Barrier full[ATT_SLOTS], empty[ATT_SLOTS];
    Barrier asked[2], answered[2];  // asked: the queries have arrived; answered: they are no longer needed
};

// The number of steps of 128 keys that a tile's queries see.
__device__ __forceinline__ int steps_of(const Work& work) {
    return ((ATT_CAUSAL ? min(work.length, work.first + QUERIES) : work.length) - 1) / KEYS + 1;
}

__device__ __forceinline__ void produce(Shared& shared, const TensorMap& map, Work work) {
    const int C = SIZE * work.n_head;
    unsigned count = 0;
    for (int tile = 0; work.next(); ++tile) {
        const auto load = [&](void* to, Barrier& barrier, int part, int first) {
            arrive_and_expect(barrier, SLOT);
            const int start = part ? C + (part - 1) * C / ATT_SERVES : 0;
            const int column = start + SIZE * (part ? work.head / ATT_SERVES : work.head);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                char* at = static_cast<char*>(to) + box * BOX;
                load_box(at, map, barrier, column + 64 * box, work.map_row + first, work.map_z);
            }
        };
        const auto load_slot = [&](int part, int step) {
            const int slot = count % ATT_SLOTS;
            wait(shared.empty[slot], count / ATT_SLOTS + 1 & 1, "empty");  // returns at once for a new slot
            load(shared.slots[slot], shared.full[slot], part, step * KEYS);
            ++count;
        };
        wait(shared.answered[tile % 2], tile / 2 + 1 & 1, "answered");
        load(shared.queries[tile % 2], shared.asked[tile % 2], 0, work.first);
        const int last = steps_of(work) - 1;
        for (int step = last; step >= 0; --step) {
            load_slot(1, step);
            if (step < last) load_slot(2, step + 1);
        }
        load_slot(2, 0);
    }
}

struct Consumer {
    Shared& shared;
    const int group, warp, lane;           // of the group, of the block's consumers, of the warp
    const Matrix first_slot, first_query;  // of the group
    unsigned count = 0;                    // slots so far

    float out[SIZE / 2];
    unsigned p[KEYS / 16][4];
    float sum[2], reference[2];  // of rows g and g + 8; the sum covers this lane's keys

    __device__ __forceinline__ Consumer(Shared& shared)
        : shared(shared), group(uniform(threadIdx.x / GROUP)), warp(uniform(threadIdx.x / 32)), lane(threadIdx.x % 32),
          first_slot(matrix_at(shared.slots[0], BOXES > 1 ? BOX : 16)),
          first_query(matrix_at(shared.queries[0] + group * GROUP_QUERIES * LINE)) {}

    __device__ __forceinline__ void take_turn() const {
        if (ATT_TURNS) sync_threads(4 + group, CONSUMERS);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (ATT_TURNS) pass_threads(4 + (group ^ 1), CONSUMERS);
    }

    __device__ __forceinline__ Matrix arrived(unsigned number) const {
        wait(shared.full[number % ATT_SLOTS], number / ATT_SLOTS & 1, "full");
        return further(first_slot, number % ATT_SLOTS * SLOT);
    }

    __device__ __forceinline__ void release(Barrier& barrier) const {
        if (lane == 0) arrive(barrier);
    }

    // A store that never happens but that the compiler keeps between the softmax and what follows. Otherwise it would
    // wait for P V first, and the softmax would not overlap it.
    __device__ __forceinline__ void hold() const {
        asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(
                         sum[0] + sum[1]),
                     "r"(shared_address(shared.out[0]))
                     : "memory");
    }

    __device__ __forceinline__ void ask_for_scores(float (&s)[KEYS / 2], int tile, Matrix keys) const {
        const Matrix queries = further(first_query, tile % 2 * SLOT);
#pragma unroll
        for (int i = 0; i < SIZE / 16; ++i) {
            const int at = i / 4 * BOX + i % 4 * 32;
            multiply(s, further(queries, at), further(keys, at), i > 0);
        }
        end_products();
    }

    __device__ __forceinline__ void ask_for_out(Matrix values) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) multiply<true>(out, p[i], further(values, 16 * LINE * i), true);
        end_products();
    }

    // Masks scores FROM to TO whose keys come after `seen`; row g + 8 sees `later` more keys. Keys are counted from the
    // lane's first one in this range.
    template <int FROM, int TO>
    __device__ __forceinline__ static void mask(float (&s)[KEYS / 2], int seen, int later) {
#pragma unroll
        for (int i = FROM; i < TO; ++i) {
            if ((i - FROM) / 4 * 8 + i % 2 > seen + (i & 2 ? later : 0)) s[i] = -INFINITY;
        }
    }

    // Replaces the first COUNT scores by P, as floats; the others are not seen. Returns whether some of the warp's rows
    // have a new reference; the caller must then multiply `out` by `factor`.
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
            base[r] = reference[r] == -INFINITY ? 0.0f : -reference[r];  // -inf + inf would be NaN
            moves |= passes;
        }
        moves = __any_sync(0xffffffffu, moves);
        if (moves) sum[0] *= factor[0], sum[1] *= factor[1];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            s[i] = exp2_fast(fmaf(s[i], UNIT, base[i / 2 % 2]));
            sum[i / 2 % 2] += s[i];
        }
        return moves;
    }

    template <int COUNT>
    __device__ __forceinline__ void pack(const float (&s)[KEYS / 2]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = 2 * i < COUNT ? pack2(s[2 * i], s[2 * i + 1]) : 0;
    }

    // Whether 128 rows of V are finite. Both groups check before one of them changes the values.
    __device__ __forceinline__ bool all_finite(const char* values) const {
        unsigned found = 0;
        const uint4* units = reinterpret_cast<const uint4*>(values) + (32 * warp + lane) % GROUP;
#pragma unroll
        for (int i = 0; i < SLOT / 16; i += GROUP) {
            const uint4 unit = units[i];
            found |= not_finite(unit.x) | not_finite(unit.y) | not_finite(unit.z) | not_finite(unit.w);
        }
        return !any_of_threads(1 + group, GROUP, found != 0);
    }

    __device__ __forceinline__ static void make_finite(char* values) {
        sync_threads(3, CONSUMERS);
        unsigned* pairs = reinterpret_cast<unsigned*>(values);
        for (int i = threadIdx.x; i < SLOT / 4; i += CONSUMERS) pairs[i] &= ~((not_finite(pairs[i]) >> 15) * 0xffffu);
        show_writes();
        sync_threads(3, CONSUMERS);
    }

    // Adds the values that make_finite() has removed from keys `from` to `to`, for rows that see them.
    __device__ __forceinline__ void add_not_finite(const T* values, long long stride, int from, int to, int row) {
#pragma unroll 1
        for (int key = from; key < to; ++key) {
#pragma unroll
            for (int i = 0; i < SIZE / 4; ++i) {
                const T* at = values + key * stride + i / 2 * 8 + lane % 4 * 2 + i % 2;
                const float v = widen(*at);
                if (!is_finite(v)) {
                    if (!ATT_CAUSAL || key <= row) out[i / 2 * 4 + i % 2] += v;
                    if (!ATT_CAUSAL || key <= row + 8) out[i / 2 * 4 + 2 + i % 2] += v;
                }
            }
        }
    }

    // Stores 16 rows of the warp, of which `left` exist, at `to`.
    __device__ __forceinline__ void store(T* to, long long stride, int left) {
        const int place = shared_address(shared.out[warp]);
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = __fdividef(1.0f, lanes_sum<4>(sum[r]));
        __syncwarp();  // the previous rows have been read from there
#pragma unroll
        for (int i = 0; i < SIZE / 2; i += 8) {  // 16 columns
            unsigned y[4];                       // j % 2: the lower rows; j / 2: the right columns
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                y[j] = pack2(out[i + 2 * j] * factor[j % 2], out[i + 2 * j + 1] * factor[j % 2]);
            }
            store_matrices(swizzled(place + lane % 16 * ROW_BYTES + lane / 16 * 16 + 4 * i), y[0], y[1], y[2], y[3]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * ROW_BYTES; i += 32 * 16) {
            const int at = i + 16 * lane, row = at / ROW_BYTES;
            const uint4 unit = *reinterpret_cast<const uint4*>(shared.out[warp] + swizzled(at));
            if (row < left) *reinterpret_cast<uint4*>(to + row * stride + at % ROW_BYTES / 2) = unit;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_hopper(
    const __grid_constant__ TensorMap map,  // of qkv
    const T* qkv,                           // (rows, W)
    const int* cu_seqlens,                  // (B + 1), not decreasing; null: B sequences of seq_len rows
    T* out,                                 // (rows, C)
    int B,
    int seq_len,     // of the longest sequence
    int n_head,
    int together) {  // heads per band
    extern __shared__ char unaligned[];
    Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    let_next_start();
    if (threadIdx.x == 0) {
        prefetch(map);
        for (int i = 0; i < ATT_SLOTS; ++i) init(shared.full[i], 1), init(shared.empty[i], CONSUMERS / 32);
        for (int i = 0; i < 2; ++i) init(shared.asked[i], 1), init(shared.answered[i], CONSUMERS / 32);
        fence_inits();
    }
    __syncthreads();
    wait_before_copies();
    Work work{cu_seqlens, B, seq_len, n_head, together, (int)blockIdx.x, (int)gridDim.x};
    if (uniform(threadIdx.x / 32) >= CONSUMERS / 32) {
        if constexpr (TIGHT) give_registers<40>();
        if (uniform(threadIdx.x / 32) == CONSUMERS / 32 && elect_one()) produce(shared, map, work);
        __syncwarp();
        return;
    }
    if constexpr (TIGHT) take_registers<232>();
    if (!work.next()) return;
    Consumer own(shared);
    if (own.group == 1) own.pass_turn();
    const int C = SIZE * n_head, to_values = C + C / ATT_SERVES;
    const long long stride = C + 2 * C / ATT_SERVES;
    bool more = true;
    float s[KEYS / 2], factor[2];
    const auto ask_for_first = [&](int tile) {  // its first scores; unused ones if there is no next tile
        if (more) wait(shared.asked[tile % 2], tile / 2 & 1, "asked");
        own.ask_for_scores(s, tile, more ? own.arrived(own.count) : own.first_slot);
    };
    own.take_turn();
    fence_sums();
    ask_for_first(0);
    own.pass_turn();
#pragma unroll 1
    for (int tile = 0; more; ++tile) {
        const int last = steps_of(work) - 1, left = work.length - last * KEYS;  // the last keys come first
        const int warp_row = work.first + 16 * own.warp, row = warp_row + own.lane / 4;
        bool finite = true;
        if (ATT_CAUSAL || (cu_seqlens && left < KEYS)) {
            const unsigned number = own.count + (last > 0 ? 2 : 1);
            own.arrived(number);
            finite = own.all_finite(shared.slots[number % ATT_SLOTS]);
            if (!finite) own.make_finite(shared.slots[number % ATT_SLOTS]);
        }
        own.sum[0] = own.sum[1] = 0.0f;
        own.reference[0] = own.reference[1] = -INFINITY;
        wait_for_products<0>();
        pin(s);
        own.release(shared.empty[own.count++ % ATT_SLOTS]);
        const int key = 2 * (own.lane % 4);
        if (ATT_CAUSAL && own.group == 0) {
            own.mask<0, KEYS / 4>(s, (row - work.first) - key, 8);
            own.soften<KEYS / 4>(s, factor);
            own.pack<KEYS / 4>(s);
        } else {
            if (ATT_CAUSAL) {
                own.mask<KEYS / 4, KEYS / 2>(s, (row - work.first) - GROUP_QUERIES - key, 8);
            } else if (left < KEYS) {
                own.mask<0, KEYS / 2>(s, left - 1 - key, 0);
            }
            own.soften<KEYS / 2>(s, factor);
            own.pack<KEYS / 2>(s);
        }
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) own.out[i] = 0.0f;
#pragma unroll 1
        for (int step = last; step > 0; --step) {
            const Matrix keys = own.arrived(own.count);
            own.take_turn();
            fence_sums();
            own.ask_for_scores(s, tile, keys);
            own.ask_for_out(own.arrived(own.count + 1));
            own.pass_turn();
            wait_for_products<1>();
            pin(s);
            own.release(shared.empty[own.count++ % ATT_SLOTS]);
            const bool moves = own.soften<KEYS / 2>(s, factor);
            own.hold();
            wait_for_products<0>();
            pin(own.out);
            own.release(shared.empty[own.count++ % ATT_SLOTS]);
            if (moves) {
#pragma unroll
                for (int i = 0; i < SIZE / 2; ++i) own.out[i] *= factor[i / 2 % 2];
            }
            own.pack<KEYS / 2>(s);
        }
        own.release(shared.answered[tile % 2]);
        T* const to = out + (work.row + warp_row) * C + SIZE * work.head;
        const T* const values = qkv + work.row * stride + to_values + SIZE * (work.head / ATT_SERVES);
        const int rows = work.length - warp_row, from = last * KEYS, end = min(work.length, from + KEYS);
        more = work.next();
        const unsigned number = own.count++;
        const Matrix last_values = own.arrived(number);
        own.take_turn();
        fence_sums();
        own.ask_for_out(last_values);
        ask_for_first(tile + 1);
        own.pass_turn();
        wait_for_products<1>();
        pin(own.out);
        own.release(shared.empty[number % ATT_SLOTS]);
        if (!finite) own.add_not_finite(values, stride, from, end, row);
        own.store(to, C, rows);
    }
    wait_for_products<0>();
}
