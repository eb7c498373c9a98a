// Attention of decoding, for one query per row of a batch: what attention/decode/split.cu and append.cu share.
//
//   q, out (M, C), C = NH HS     k, v (B, n_ctx, NKV HS) of type KV    row, position (M): query m belongs to sequence
//   row[m] of the cache, and sees keys 0..position[m] of this sequence
//
// A head of K and V serves NH / NKV neighbouring heads of q. A team of warps processes AS_QUERIES of these heads.
// AS_QUERIES is smaller if the GPU has room for more teams, whose loops are then shorter. Results have the same bits
// for any AS_QUERIES. For one head of q, and for each of its splits (a split is 32 consecutive keys), a warp computes
//
//   m = max s_j        s_j = q k_j log2(e) / sqrt(HS)
//   l = sum 2^(s_j - m),   part = sum 2^(s_j - m) v_j
//
// The results of the 32 splits of a span (1,024 keys) are combined in shared memory, one lane per split, with w = 2^(m
// - largest m): L = sum w l, O = sum w part. Later spans are added in the same way. The output O / L is not written if
// row[m] is outside 0..B - 1 or position[m] < 0.
//
//   a head's keys    | split 0 | split 1 | ...      split s belongs to warp s % WORKERS of the team
//   a warp's keys    GROUPS keys at a time; LANES neighbouring lanes read a key, 16 bytes each, in PIECES loads
//
// A team has AS_WARPS warps in each of the AS_CLUSTER blocks of a cluster; its results go to the first block's shared
// memory. With few queries, the keys of a head spread over several multiprocessors. The order of additions depends only
// on HS, KV, AS_WIDTH and AS_VECTORS.
//
// A thread holds its vectors of HELD keys and HELD values in registers. It loads the next vectors after using these.
// With a window, split 0 contains the window's first key. The grid does not depend on positions.
//
// Grid (AS_CLUSTER, teams / AS_HEADS, M), block (32 AS_HEADS AS_WARPS), with AS_QUERIES > 1 or HS > 256 sizeof(Shared)
// bytes of dynamic shared memory. Positions beyond the cache mean its last position.
#pragma once
#include "lib/attention/spans.cuh"
#include "lib/attention/unit.cuh"
#include "lib/attention/window.cuh"
#include "lib/cluster.cuh"
#include "lib/common.cuh"
#include "lib/exchange.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"  // includes lib/operands.cuh

#ifndef NH
#define NH 12
#endif
#ifndef NKV  // heads of K, and of V
#define NKV NH
#endif
#ifndef HS
#define HS 64
#endif
#ifndef AS_WIDTH  // elements per load of k, v (aligned to a load): a power of two that divides HS, at most 16 bytes
#define AS_WIDTH 4
#endif
#ifndef AS_QUERIES  // heads of q per team of warps
#define AS_QUERIES 1
#endif
#ifndef AS_HEADS  // teams of warps per block
#define AS_HEADS 1
#endif
#ifndef AS_WARPS  // warps of a team in each block
#define AS_WARPS 4
#endif
#ifndef AS_CLUSTER  // blocks of a cluster, which share the keys of a head
#define AS_CLUSTER 1
#endif
#if AS_CLUSTER == 1  // a single block is launched without a cluster
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif
#ifndef AS_BLOCKS  // minimum blocks per multiprocessor: limits the registers
#define AS_BLOCKS 1
#endif
#ifndef AS_OPERAND  // format of out: a kind of terms (16-bit parts of floats, lib/operands.cuh); 0: floats
#define AS_OPERAND 0
#endif
#ifndef AS_VECTORS  // vectors of K, and of V, in flight per thread
#define AS_VECTORS 8
#endif
#ifndef AS_PEER_STORES  // 1: out, as floats, is also sent to the other GPUs
#define AS_PEER_STORES 0
#endif
#ifndef AS_DRAFTS  // 1: each sequence has `together` consecutive rows, for draft tokens
#define AS_DRAFTS 0
#endif
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int ROW = NH * HS, KV_ROW = NKV * HS, SERVES = NH / NKV;  // SERVES: heads of q per head of K
constexpr int TEAMS = (SERVES + AS_QUERIES - 1) / AS_QUERIES;  // number of teams for each head of K
constexpr int SLOTS = AS_HEADS * AS_QUERIES;                  // heads of q per block
constexpr int KEYS = 32, SPAN = 32;                           // KEYS: keys per split; SPAN: splits per span
constexpr int VECTORS = HS / AS_WIDTH;                        // vectors of AS_WIDTH elements per key
constexpr int LANES = least(next_power(VECTORS), 32);         // lanes that share a key
constexpr int PIECES = (VECTORS + LANES - 1) / LANES;         // vectors that each lane loads of a key
constexpr int GROUPS = 32 / LANES;                            // keys that a warp loads at a time
constexpr int SHARE = KEYS / GROUPS;                          // keys of a split that each thread processes
constexpr int HELD = least(SHARE, AS_VECTORS < PIECES ? 1 : AS_VECTORS / next_power(PIECES));  // keys held per thread
constexpr int ROUNDS = SHARE / HELD;
constexpr int ROUND = HELD * GROUPS;                          // keys that a warp processes per round
constexpr int WARPS = AS_HEADS * AS_WARPS, WORKERS = AS_WARPS * AS_CLUSTER;
constexpr int CHUNKS = (HS + 31) / 32;                        // groups of 32 channels per head
constexpr int ITEMS = (SLOTS * CHUNKS + WARPS - 1) / WARPS;   // groups of 32 channels that a warp combines
static_assert(NH > 0 && HS > 0 && HS <= 512, "HS: 1 to 512");
static_assert(HS % AS_WIDTH == 0, "a head is whole vectors");
static_assert(NH % NKV == 0, "every head of K serves as many heads of q");
static_assert(!AS_OPERAND || HS % (OPERAND_SUMS ? 32 : 2) == 0, "a pair of channels, or a chunk, is of one head");
static_assert(NKV * TEAMS % AS_HEADS == 0, "a block takes whole teams");
static_assert(HELD * ROUNDS == SHARE, "a thread's keys make whole rounds");

typedef Vec<KV, AS_WIDTH> Vector;
typedef float Queries[AS_QUERIES][PIECES][AS_WIDTH];

struct Shared {
    alignas(16) float parts[SLOTS][SPAN][HS];
    float m[SLOTS][SPAN], l[SLOTS][SPAN];
};

__device__ __forceinline__ Shared& shared_memory() {
#if AS_QUERIES > 1 || HS > 256  // sizeof(Shared) can exceed the limit of static shared memory
    extern __shared__ __align__(16) char memory[];
    return *reinterpret_cast<Shared*>(memory);
#else
    __shared__ Shared shared;
    return shared;
#endif
}

// head_of: the first head of q that a team of warps computes. queries_of: the team's number of heads of q.
__device__ __forceinline__ int head_of(int team) { return team / TEAMS * SERVES + team % TEAMS * AS_QUERIES; }
__device__ __forceinline__ int queries_of(int team) { return least(AS_QUERIES, SERVES - team % TEAMS * AS_QUERIES); }

template <typename Op>
__device__ __forceinline__ float across_groups(float value) {  // combines the values of lanes with equal lane % LANES
#pragma unroll
    for (int distance = 16; distance >= LANES; distance /= 2) {
        value = Op::combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// Calls use(i, p) for each vector that a thread loads in a round: vector p of the thread's i-th key.
template <typename Use>
__device__ __forceinline__ void each(Use use) {
    const int vector = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (VECTORS % LANES && vector + p * LANES >= VECTORS) continue;
            use(i, p);
        }
    }
}

// The vectors of K or V that a thread holds in a round, for HELD keys.
struct Held {
    Vector vectors[HELD][PIECES] = {};  // zeros where a lane has no vector

    // Loads keys from..to of the round that begins with key `first`. own: this thread's first vector of key 0.
    __device__ __forceinline__ void add(const KV* own, int first, int from, int to) {
        const int group = threadIdx.x % 32 / LANES;
        const KV* const here = own + (long long)first * KV_ROW;
        each([&](int i, int p) {
            const int key = first + i * GROUPS + group;
            if (from <= key && key <= to) vectors[i][p] = of(here, i, p);
        });
    }

    // Loads the keys of the round that are in lowest..last. Sets the vectors of the round's other keys to 0.
    __device__ __forceinline__ void load(const KV* own, int first, int lowest, int last) {
        if (first + ROUND - 1 <= last && (!WINDOW || first >= lowest)) {
            const KV* const here = own + (long long)first * KV_ROW;
            each([&](int i, int p) { vectors[i][p] = of(here, i, p); });
        } else {
            each([&](int i, int p) { vectors[i][p] = {}; });
            if (first <= last) add(own, first, lowest, last);
        }
    }

    static __device__ __forceinline__ Vector of(const KV* here, int i, int p) {
        return load_fresh<KV, AS_WIDTH>(here + i * GROUPS * KV_ROW + p * LANES * AS_WIDTH);
    }
};

// Computes this lane's part of the dot product of x with each of its keys.
__device__ __forceinline__ void multiply(const float (&x)[PIECES][AS_WIDTH], const Held& keys, float (&s)[HELD]) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        s[i] = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            float key[AS_WIDTH];
            keys.vectors[i][p].unpack(key);
#pragma unroll
            for (int e = 0; e < AS_WIDTH; ++e) s[i] = fmaf(x[p][e], key[e], s[i]);
        }
    }
}

// Adds dot products over the lanes of each key, and scales them to scores: -inf for keys after position `last`.
__device__ __forceinline__ void score(int first, int last, float (&s)[HELD]) {
    const float unit = score_unit(HS);  // a compile-time constant
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int key = first + i * GROUPS + (int)threadIdx.x % 32 / LANES;
        const bool visible = key <= last && !is_past(key, last);
        s[i] = __fmul_rn(lanes_sum<LANES>(s[i]), unit);
        if (!visible) s[i] = -INFINITY;
    }
}

// The softmax over the keys of a split (32 keys) that the warp has processed so far.
struct Softmax {
    float m = -INFINITY, l = 0.0f;  // m: the warp's maximum score; l, o: sums over the thread's keys
    float o[PIECES][AS_WIDTH] = {};

    // Updates the running softmax with the thread's next keys, whose scores are s and whose values are v.
    __device__ __forceinline__ void add(float (&s)[HELD], const Held& v) {
        float max = s[0];
#pragma unroll
        for (int i = 1; i < HELD; ++i) max = fmaxf(max, s[i]);
        max = fmaxf(m, across_groups<reduction::Max>(max));
        const float point = max == -INFINITY ? 0.0f : max;  // exp2(-inf - 0) is 0, but exp2(-inf + inf) is NaN
        if (ROUNDS > 1) {
            const float scale = exp2f(m - point);
            l = __fmul_rn(l, scale);  // rounded, not fused: every variant of the kernel computes the same bits
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
#pragma unroll
                for (int e = 0; e < AS_WIDTH; ++e) o[p][e] = __fmul_rn(o[p][e], scale);
            }
        }
        m = max;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const float weight = exp2f(s[i] - point);
            l += weight;
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                float values[AS_WIDTH];
                v.vectors[i][p].unpack(values);
#pragma unroll
                for (int e = 0; e < AS_WIDTH; ++e) o[p][e] = fmaf(weight, values[e], o[p][e]);
            }
        }
    }

    // Writes the results of a split (32 keys) to the shared memory of the cluster's first block.
    __device__ __forceinline__ void store(Shared& shared, int slot, int place) {
        const int lane = threadIdx.x % 32;
        Shared& to = AS_CLUSTER > 1 ? *in_first_block(&shared) : shared;
        l = across_groups<reduction::Sum>(l);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const int vector = lane % LANES + p * LANES;
#pragma unroll
            for (int e = 0; e < AS_WIDTH; ++e) o[p][e] = across_groups<reduction::Sum>(o[p][e]);
            if (lane >= LANES || vector >= VECTORS) continue;
            float* const here = to.parts[slot][place] + vector * AS_WIDTH;
            constexpr int STORE = least(AS_WIDTH, 4);
#pragma unroll
            for (int e = 0; e < AS_WIDTH; e += STORE) {
                Vec<float, STORE>::store(here + e, *reinterpret_cast<const float(*)[STORE]>(o[p] + e));
            }
        }
        if (lane == 0) to.m[slot][place] = m, to.l[slot][place] = l;
    }
};

// A barrier for all warps of a team. Writes to shared memory before the barrier are visible after it.
__device__ __forceinline__ void sync_team() {
    if (AS_CLUSTER > 1) {
        release_to_cluster();
        acquire_from_cluster();
    } else {
        __syncthreads();
    }
}

// The work of a warp: its team, the first head of q of this team, and its splits, `worker` + n WORKERS.
struct Work {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = AS_CLUSTER > 1 ? rank_in_cluster() : 0;
    const int worker = warp % AS_WARPS * AS_CLUSTER + rank, slot = warp / AS_WARPS * AS_QUERIES;
    const int team = blockIdx.y * AS_HEADS + warp / AS_WARPS, head = head_of(team);
    const int column = head * HS + lane % LANES * AS_WIDTH;  // the lane's first channel of q

    // Returns the index of the lane's first vector of key 0 of sequence b, in k and v.
    __device__ __forceinline__ long long first_vector(int b, int n_ctx) const {
        return ((long long)b * n_ctx + lane / LANES) * KV_ROW + column - (head - team / TEAMS) * HS;
    }
};

// The keys of the sequence that a warp processes.
struct Range {
    int lowest, origin, first, last;  // first key that the query sees, of split 0, of the warp's round; last key

    __device__ __forceinline__ Range(const Work& work, int last)
        : lowest(first_seen(last)), origin(lowest / KEYS * KEYS), first(origin + work.worker * KEYS), last(last) {}
};

// attention_split: the kv_cache contains all keys.
struct NothingNew {
    __device__ __forceinline__ int stored(int last) const { return last; }
    __device__ __forceinline__ void put_key(int, Held&) const {}
    __device__ __forceinline__ void put_value(int, Held&) const {}
};

// Computes the outputs of a query. k, v: as from Work::first_vector. keys, values: of the warp's first round. x: the
// lane's channels of the team's heads of q. New: stored(last) is the last key to load from the kv_cache; put_key and
// put_value add a later key to the keys and values of the round that begins with a given key.
template <typename New>
__device__ __forceinline__ void attend(
    const New& newest, const Work& work, Range of, const KV* k, const KV* v, Held& keys, Held& values, const Queries& x,
    Shared& shared, float out_scale, float* out, const Peers& peers, unsigned exchange) {
    const int warp = work.warp, lane = work.lane, rank = work.rank;
    if (AS_CLUSTER > 1) wait_for_cluster();  // the first block has started: its shared memory can be written

    const int splits = (of.last - of.origin) / KEYS + 1;
    int split = work.worker;
    Whole whole[ITEMS];
    for (int begin = 0;; begin += SPAN) {
        const int count = min(splits - begin, SPAN);
#pragma unroll 1
        for (; split < begin + count; split += WORKERS) {
            Softmax softmax[AS_QUERIES];
#pragma unroll 1
            for (int round = 0; round < ROUNDS; ++round) {
                const int next = round + 1 < ROUNDS ? of.first + ROUND : of.origin + (split + WORKERS) * KEYS;
                float s[AS_QUERIES][HELD];
#pragma unroll
                for (int i = 0; i < AS_QUERIES; ++i) multiply(x[i], keys, s[i]);
                if (next <= of.last) keys.load(k, next, of.lowest, newest.stored(of.last)), newest.put_key(next, keys);
#pragma unroll
                for (int i = 0; i < AS_QUERIES; ++i) {
                    score(of.first, of.last, s[i]);
                    softmax[i].add(s[i], values);
                }
                if (next <= of.last) {
                    values.load(v, next, of.lowest, newest.stored(of.last));
                    newest.put_value(next, values);
                }
                of.first = next;
            }
#pragma unroll
            for (int i = 0; i < AS_QUERIES; ++i) softmax[i].store(shared, work.slot + i, split % SPAN);
        }
        const bool more = begin + SPAN < splits;
        if (rank > 0 && !more) return release_to_cluster();  // arrives at the barrier without waiting
        sync_team();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = warp + i * WARPS, channel = item % CHUNKS * 32 + lane;
            if (rank > 0 || item >= SLOTS * CHUNKS) continue;
            const int slot = item / CHUNKS, own_query = slot % AS_QUERIES;
            const int team = blockIdx.y * AS_HEADS + slot / AS_QUERIES;
            whole[i].add<HS>(shared, slot, channel, count, begin > 0);
            if (more || own_query >= queries_of(team)) continue;
            float result = whole[i].o / whole[i].l;
            const int at = (head_of(team) + own_query) * HS + channel, m = blockIdx.z, M = gridDim.z;
            if (AS_PEER_STORES && channel < HS) peers.store_outputs<1>(m, at, {result}, exchange);
            if constexpr (AS_OPERAND) result = term_of<AS_OPERAND>(result, inverse_of(out_scale));
            if constexpr (OPERAND_SUMS) store_sum_of_pairs(out, (unsigned)__float_as_int(result), m, at, M, ROW);
            if (channel < HS && (has_low() || channel % 2 == 0)) out[operand_place(m, at, M, ROW)] = result;
        }
        if (!more) return;
        sync_team();  // the next span overwrites the splits in shared memory
    }
}
