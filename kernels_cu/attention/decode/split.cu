// Attention of one query per row of a batch (decoding), over a kv_cache that already contains the query's own key:
//
//   attention_split: decoding: one warp per 32 keys of a head, the next keys in flight; the results of warps are
//       combined in shared memory; with few rows, the warps of a head are spread over a cluster
//
// lib/attention/split.cuh describes the arrays, and how warps share the keys.
//
// The first loads are issued before the previous kernel has ended. Until its end, `position` may change, and so may the
// keys and values of the newest `together` positions of each sequence. A position that is read so early is a hint: if
// it was wrong, the loads are repeated.
//
// Idea: Dao et al., "Flash-Decoding" (2023).
//
// Measured: docs/experiments.md#attention_split
#include "lib/attention/split.cuh"

// Sends zeros for the block's heads of a query without a sequence: the other GPUs wait for words of all queries.
__device__ __forceinline__ void store_zeros(const Peers& peers, int query, unsigned round) {
    for (int i = threadIdx.x; i < SLOTS * HS; i += 32 * WARPS) {
        const int own = i / HS % AS_QUERIES, team = blockIdx.y * AS_HEADS + i / HS / AS_QUERIES;
        if (own < queries_of(team)) peers.store_outputs<1>(query, (head_of(team) + own) * HS + i % HS, {0.0f}, round);
    }
}

// Launched by operation (variant): attention_split (split)
extern "C" __global__ void __cluster_dims__(AS_CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, AS_BLOCKS) attention_split(
    const float* q,       // (M, C)
    const KV* k,          // (B, n_ctx, NKV HS)
    const KV* v,          // (B, n_ctx, NKV HS)
    const int* row,       // (M); kernels that can overlap with this one do not write it
    const int* position,  // (M)
    int B, int n_ctx, int together,  // together: consecutive rows per sequence, a power of two
    float out_scale,      // scale of out, used if AS_OPERAND selects hi/lo terms
    float* out,           // (M, C)
    const long long* own, long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5,
    long long* to_6, long long* to_7, int first_column, int all_columns, int capacity) {  // with AS_PEER_STORES: Peers
    const Work work;
    const long long query = blockIdx.z;
    const int mine = AS_DRAFTS ? blockIdx.z & (together - 1) : 0;
    const int before = load_racing(position + query - mine), b = __ldcg(row + query);
    const bool cached = b >= 0 && b < B;
    const int hint = cached && (!AS_DRAFTS || before >= 0) ? min(before + mine, n_ctx - 1) : -1;
    if (AS_CLUSTER > 1) arrive_in_cluster();

    const long long from = work.first_vector(b, n_ctx);
    const KV *const own_k = k + from, *const own_v = v + from;
    Range of(work, hint);
    Held keys, values;
    keys.load(own_k, of.first, of.lowest, hint - mine - 1);
    values.load(own_v, of.first, of.lowest, hint - mine - 1);
    let_next_start();
    wait_for_previous();
    const Peers peers{own, {to_1, to_2, to_3, to_4, to_5, to_6, to_7}, first_column, all_columns, capacity};
    const unsigned exchange = AS_PEER_STORES ? next_round(own) : 0;
    const auto end_without_keys = [&] {
        if (AS_PEER_STORES && work.rank == 0) store_zeros(peers, query, exchange);
    };
    if (!cached) return end_without_keys();

    Queries x = {};
#pragma unroll
    for (int i = 0; i < AS_QUERIES; ++i) {
        const int of_q = min(i, queries_of(work.team) - 1) * HS;  // a team with fewer heads of q repeats its last head
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (VECTORS % LANES && work.lane % LANES + p * LANES >= VECTORS) continue;
            load_fresh_floats<AS_WIDTH>(q + query * ROW + work.column + of_q + p * LANES * AS_WIDTH, x[i][p]);
        }
    }
    if (of.first <= hint && hint - mine < of.first + ROUND) {
        keys.add(own_k, of.first, AS_DRAFTS ? max(hint - mine, of.lowest) : hint, hint);
        values.add(own_v, of.first, AS_DRAFTS ? max(hint - mine, of.lowest) : hint, hint);
    }
    const int last = min(__ldcg(position + query), n_ctx - 1);
    if (last < 0) return end_without_keys();
    if (last != hint) {  // the hint was wrong: repeat the loads
        of = Range(work, last);
        keys.load(own_k, of.first, of.lowest, last);
        values.load(own_v, of.first, of.lowest, last);
    }
    attend(NothingNew{}, work, of, own_k, own_v, keys, values, x, shared_memory(), out_scale, out, peers, exchange);
}
