// Causal attention of several tokens per sequence over a kv_cache that already contains the keys and values of these
// tokens.
//
//   out = softmax(Q K^T / sqrt(HS)) V for each head: the query at position p of sequence b sees keys 0..p of b
//
//   q   (N, C), rows q_distance apart, C = NH HS: the queries of all sequences, packed one sequence after the other
//   out (N, C)
//   k, v (B, n_ctx, NKV HS) of type KV: each head of k and v serves NH / NKV neighbouring heads of q
//
//   attention_cached: attention_forward_online (learn/attention/online.cu) over packed rows of several sequences; a
//       result's bits depend on its own sequence only. q and out are float for every KV
//   attention_cached_narrow: attention_cached with q and out in 16 bits. Their type is T, the input type of
//       tensor-core products; arithmetic is float
//
//   sequence b: queries cu_seqlens[b]..cu_seqlens[b + 1] - 1, at positions start[b], start[b] + 1, ...; possibly none
//
// lib/attention/online.cuh contains the algorithm; this file supplies the addresses of rows. A result's bits depend
// neither on later rows of its sequence nor on how the sequence was divided into calls.
//
// A sequence that would exceed row N or position n_ctx is truncated: nothing outside the arrays is read or written.
//
// Block (32 AO_WARPS), grid (B NH, ceil(longest / QUERIES)), dynamic shared memory: the arrays at the start of `attend`
// in lib/attention/online.cuh. If HS is a multiple of 4 (for float), 8 (16 bits) or 16 (FP8), q, k, v and out must be
// aligned to 16 bytes, and q_distance must be a multiple of the elements in 16 bytes: 4 floats, or 8 of 16 bits.
#include "lib/attention/online.cuh"
#include "lib/overlap.cuh"

template <typename Q>
__device__ __forceinline__ void attend_cached(
    const Q* q, const KV* k, const KV* v, const int* cu_seqlens, const int* start, Q* out, int q_distance, int n_ctx,
    int N, int B, int at_once) {
    extern __shared__ __align__(16) float tiles[];
    let_next_start();
    wait_for_previous();
    const int sequence = blockIdx.x / NH, each = N / B;
    const int first = cu_seqlens ? min(max(__ldcg(cu_seqlens + sequence), 0), N) : sequence * each;
    const int end = cu_seqlens ? min(__ldcg(cu_seqlens + sequence + 1), N) : first + each;
    const int position = max(start ? __ldcg(start + sequence) : at_once, 0);
    const int queries = min(end - first, n_ctx - position);
    if ((int)(gridDim.y - 1 - blockIdx.y) * QUERIES >= queries) return;
    attend<KV>(tiles, out, true, [&](long long b, long long h) -> Task<KV, Q> {
        const long long head = b * n_ctx * (NKV * HS) + h / GROUP * HS;
        const Q* head_q = q + (long long)first * q_distance + h * HS;
        return {head_q, k + head, v + head, q_distance, NKV * HS, queries, position, position + queries, first};
    });
}

// Launched by operation (variant): attention_cached (tiles), attention_packed (tiles), attention_queries (tiles)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_cached(
    const float* q,         // (N, C), rows q_distance apart
    const KV* k,            // (B, n_ctx, NKV HS)
    const KV* v,            // (B, n_ctx, NKV HS)
    const int* cu_seqlens,  // (B + 1), or null: N / B rows per sequence
    const int* start,       // (B), or null: every start is `at_once`
    float* out,             // (N, C)
    int q_distance, int n_ctx, int N, int B, int at_once) {
    attend_cached(q, k, v, cu_seqlens, start, out, q_distance, n_ctx, N, B, at_once);
}

// Launched by operation (variant): attention_cached (tiles), attention_packed (tiles), attention_queries (tiles)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_cached_narrow(
    const T* q,             // (N, C), rows q_distance apart
    const KV* k,            // (B, n_ctx, NKV HS)
    const KV* v,            // (B, n_ctx, NKV HS)
    const int* cu_seqlens,  // (B + 1), or null: N / B rows per sequence
    const int* start,       // (B), or null: every start is `at_once`
    T* out,                 // (N, C)
    int q_distance, int n_ctx, int N, int B, int at_once) {
    attend_cached(q, k, v, cu_seqlens, start, out, q_distance, n_ctx, N, B, at_once);
}
