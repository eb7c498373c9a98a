// Attention of decoding for models whose heads of q and k have norms, such as Qwen3: QK-Norm, RoPE, the append of K and
// V to the kv_cache, and attention of the new token of each sequence in one kernel, for GPUs whose kernels do not
// overlap. On these GPUs, one kernel takes less time than two.
//
//   qkv (M, (NH + 2 NKV) HS), rows [Q | K | V]     by (M, HS / 2, 2), cosines and sines of the rows' positions
//
//   attention_append: decoding: qk_norm_append, then attention_split. The last warps of a block, which have the fewest
//       keys, compute its heads of q for all warps; the warp of the newest key computes this key and stores K and V
//
// q, the stored keys and values, and out have the same bits as with the two kernels. K and V of a row outside the cache
// are not stored. If a head of k has several teams, the first team stores its newest key.
//
// lib/attention/split.cuh describes the other arguments, and how warps share the keys. HS is 64, 128 or 256.
//
// Measured: docs/experiments.md#attention_split
#include "lib/attention/split.cuh"
#include "lib/head_norm.cuh"
#include "lib/rotation.cuh"

static_assert(AS_HEADS == 1 && !AS_DRAFTS && !AS_PEER_STORES, "a block has one team; a sequence has one row");
static_assert(SLOTS <= WARPS, "a warp computes at most one head of q");
static_assert(VECTORS == LANES * PIECES && PIECES <= 2 && LANES > 1, "a head has whole vectors in both halves");

typedef float Channels[PIECES][AS_WIDTH];  // the channels of a head that a lane holds: vectors of a key

// Calls use(p, e) for each of these channels.
template <typename Use>
__device__ __forceinline__ void each_channel(Use use) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
#pragma unroll
        for (int e = 0; e < AS_WIDTH; ++e) use(p, e);
    }
}

// Returns the first of the AS_WIDTH channels of piece p that this lane holds.
__device__ __forceinline__ int first_channel(int p) { return (threadIdx.x % LANES + p * LANES) * AS_WIDTH; }

// Loads the lane's channels of a head (HS).
__device__ __forceinline__ void load(const float* head, Channels& to) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) load_fresh_floats<AS_WIDTH>(head + first_channel(p), to[p]);
}

// A head of q or k, its norm's weights, and its rotations.
struct Head {
    Channels x, gamma;
    float turns[PIECES][2 * AS_WIDTH];

    // Loads the lane's channels of a head (HS), of gamma (HS) and of the rotations (HS / 2, 2).
    __device__ __forceinline__ void load(const float* head, const float* gamma_of_head, const float* by) {
        ::load(head, x);
        ::load(gamma_of_head, gamma);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            load_fresh_floats<2 * AS_WIDTH>(by + 2 * (first_channel(p) % (HS / 2)), turns[p]);
        }
    }

    // Normalizes and rotates x. Squares are added in the order of lib/head_norm.cuh. All lanes of a warp must call this
    // function.
    __device__ __forceinline__ void finish(float eps) {
        Channels other;
        float squares[AS_WIDTH];
        exchange(other);
#pragma unroll
        for (int e = 0; e < AS_WIDTH; ++e) {
            const bool second = in_second(0);
            squares[e] = head_square(second ? other[0][e] : x[0][e], second ? x[0][e] : other[0][e]);
        }
        const float square = neighbours_sum<VECTORS / 2>(neighbours_sum(squares));
        const float factor = head_factor<HS>(square, eps);
        each_channel([&](int p, int e) { x[p][e] = head_normed(x[p][e], factor, gamma[p][e]); });
        exchange(other);
        each_channel([&](int p, int e) {
            float first = in_second(p) ? other[p][e] : x[p][e], second = in_second(p) ? x[p][e] : other[p][e];
            turn({turns[p][2 * e], turns[p][2 * e + 1]}, first, second);
            x[p][e] = in_second(p) ? second : first;
        });
    }

private:
    // Returns whether piece p is in the second half of the head: channels HS / 2 to HS - 1.
    static __device__ __forceinline__ bool in_second(int p) { return first_channel(p) >= HS / 2; }

    // other: for each channel of x, the other channel of its pair, which another lane or the same lane holds.
    __device__ __forceinline__ void exchange(Channels& other) const {
        each_channel([&](int p, int e) {
            other[p][e] = PIECES > 1 ? x[PIECES - 1 - p][e] : __shfl_xor_sync(0xffffffffu, x[p][e], LANES / 2);
        });
    }
};

// The newest key and value. The lanes that hold their vectors keep them in shared memory until the round that contains
// them: other blocks of the same head of k store or compute them at the same time.
struct Newest {
    Vector (&vectors)[2][VECTORS];  // key, value
    int at;                         // position; not in any round if another lane holds the vectors
    bool appends;                   // false if the token is beyond the cache

    // Returns the last position whose key the kv_cache holds.
    __device__ __forceinline__ int stored(int last) const { return last - appends; }

    // Replace the lane's vectors of the newest key or value in `held`, if the round from position `first` contains it.
    __device__ __forceinline__ void put_key(int first, Held& held) const { put(vectors[0], first, held); }
    __device__ __forceinline__ void put_value(int first, Held& held) const { put(vectors[1], first, held); }

    // Keeps a key or value. to: its place in the kv_cache, or null.
    __device__ __forceinline__ void keep(const Channels& x, Vector (&kept)[VECTORS], KV* to) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            kept[threadIdx.x % LANES + p * LANES] = Vector::pack(x[p]);
            if (to) Vector::store(to + first_channel(p), x[p]);
        }
    }

private:
    // Replaces, in the round of keys from `first` on, the lane's vectors of the newest position by `kept`.
    __device__ __forceinline__ void put(const Vector (&kept)[VECTORS], int first, Held& held) const {
        if (at < first || at >= first + ROUND) return;
        const int own = (at - first) / GROUPS;
        each([&](int i, int p) {
            held.vectors[i][p] = i == own ? kept[threadIdx.x % LANES + p * LANES] : held.vectors[i][p];
        });
    }
};

// Launched by operation (variant): attention_append (append and split)
extern "C" __global__ void __cluster_dims__(AS_CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, AS_BLOCKS) attention_append(
    const float* qkv,                 // (M, C + 2 NKV HS)
    const float* by,                  // (M, HS / 2, 2)
    const float* gamma_q,             // (HS)
    const float* gamma_k,             // (HS)
    KV* k,                            // (B, n_ctx, NKV HS)
    KV* v,                            // (B, n_ctx, NKV HS)
    const int* row,                   // (M)
    const int* position,              // (M)
    float eps, int B, int n_ctx, float out_scale,
    float* out) {                     // (M, C)
    let_next_start();
    wait_for_previous();
    __shared__ alignas(16) float queries[SLOTS][HS];
    __shared__ Vector vectors[2][VECTORS];
    if (AS_CLUSTER > 1) arrive_in_cluster();
    const Work work;
    const long long query = blockIdx.z;
    const float* const own = qkv + query * (ROW + 2 * KV_ROW);
    const float* const turns = by + query * HS;
    const int at = __ldcg(position + query), b = __ldcg(row + query);
    const int slot = WARPS - 1 - work.warp;  // if it is less than SLOTS, this warp computes a head of q
    const int of_kv = work.team / TEAMS * HS;
    Head of_q;
    if (slot < SLOTS) of_q.load(own + (work.head + min(slot, queries_of(work.team) - 1)) * HS, gamma_q, turns);
    if (b < 0 || b >= B || at < 0) return;

    const int last = min(at, n_ctx - 1);
    Newest newest{vectors, -1, at == last};
    const long long from = work.first_vector(b, n_ctx);
    Range of(work, last);
    Held keys, values;
    keys.load(k + from, of.first, of.lowest, newest.stored(last));
    values.load(v + from, of.first, of.lowest, newest.stored(last));
    if (slot < SLOTS) {
        of_q.finish(eps);
        float* const to = queries[slot];
        if (work.lane < LANES) each_channel([&](int p, int e) { to[first_channel(p) + e] = of_q.x[p][e]; });
    }
    const bool owns = newest.appends && (last - of.origin) / KEYS % WORKERS == work.worker;  // this warp owns its key
    Head of_k;
    if (owns) of_k.load(own + ROW + of_kv, gamma_k, turns);
    __syncthreads();
    if (owns) {
        of_k.finish(eps);
        if (work.lane / LANES == last % GROUPS) {
            const long long place = ((long long)b * n_ctx + last) * KV_ROW + of_kv;
            const bool stores = work.team % TEAMS == 0;
            newest.at = last;
            newest.keep(of_k.x, vectors[0], stores ? k + place : nullptr);
            load(own + ROW + KV_ROW + of_kv, of_k.x);
            newest.keep(of_k.x, vectors[1], stores ? v + place : nullptr);
        }
        newest.put_key(of.first, keys), newest.put_value(of.first, values);
    }
    Queries x;
#pragma unroll
    for (int i = 0; i < AS_QUERIES; ++i) {
        each_channel([&](int p, int e) { x[i][p][e] = queries[i][first_channel(p) + e]; });
    }
    attend(newest, work, of, k + from, v + from, keys, values, x, shared_memory(), out_scale, out, Peers{}, 0);
}
