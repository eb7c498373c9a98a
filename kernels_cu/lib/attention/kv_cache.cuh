// Determines where new keys and values belong in a kv_cache. Included by attention/cache/kv_cache.cu and
// attention/cache/kv_cache_hi_lo.cu.
//
// One thread copies a vector of KV_WIDTH channels at a time. Rows and positions outside the cache are skipped. Grid:
// one block per row of qkv; block: any number of threads.
#pragma once

#ifndef KV_WIDTH  // channels per aligned vector: a power of two dividing C and W; 16 bytes at most
#define KV_WIDTH 4
#endif

// Calls move(from, to) for each vector of K and V in row blockIdx.x. `from`: offset in qkv. `to`: address in the cache.
template <typename E, typename Move>
__device__ __forceinline__ void append(
    const int* row, const int* position, E* k, E* v, int C, int W, int B, int n_ctx, Move move) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int b = __ldcg(row + n), at = __ldcg(position + n);
    if (b < 0 || b >= B || at < 0 || at >= n_ctx) return;
    const long long from = (n + 1) * W - 2 * C;  // offset of K in qkv; V follows
    const long long to = ((long long)b * n_ctx + at) * C;
    for (int i = threadIdx.x * KV_WIDTH; i < 2 * C; i += blockDim.x * KV_WIDTH) {
        move(from + i, i < C ? k + to + i : v + to + (i - C));
    }
}
