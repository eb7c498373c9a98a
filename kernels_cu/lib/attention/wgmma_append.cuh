// Stores a tile's new keys and values in a kv_cache, by warps of attention/prompt/wgmma.cu and
// attention/prompt/wgmma_alternate.cu that have no other work. The including file defines QUERIES and includes
// lib/attention/scores.cuh, lib/attention/wgmma_work.cuh and lib/storage.cuh.
#pragma once

struct KvCache {
    const int *row, *position;  // (rows): sequence and position of each row of qkv
    T *k, *v;                   // (B, n_ctx, C / ATT_SERVES), aligned to 16 bytes
    int B, n_ctx;
};

// Copies K and V of a tile's rows. warp: index of the calling warp among the `warps` warps that copy. A warp copies 32
// rows of the tile at a time. Rows and positions outside the cache are skipped. If several heads of Q share a head of K
// and V, only the tiles of the first of these heads of Q copy it.
__device__ __forceinline__ void append(const Work& work, const T* qkv, const KvCache& cache, int warp, int warps) {
    constexpr int UNITS = SIZE / 8, ROWS = 32 / UNITS;  // 16-byte units per row; rows that a warp copies at once
    constexpr int AT_ONCE = 2;                          // copies in flight per lane
    if (work.head % ATT_SERVES) return;
    const int lane = threadIdx.x % 32, C = SIZE * work.n_head, KV = C / ATT_SERVES;
    const int column = SIZE * (work.head / ATT_SERVES) + lane % UNITS * 8;
#pragma unroll 1
    for (int piece = 32 * warp; piece < min(QUERIES, work.length - work.first); piece += 32 * warps) {
        const long long first = work.row + work.first + piece;
        const int there = work.length - work.first - piece;
        int place = -1;  // row of the cache for row `lane` of the 32 rows; -1: not stored
        if (lane < there) {
            const int b = __ldcg(cache.row + first + lane), at = __ldcg(cache.position + first + lane);
            if (b >= 0 && b < cache.B && at >= 0 && at < cache.n_ctx) place = b * cache.n_ctx + at;
        }
#pragma unroll 1
        for (int i = 0; i < 32 && i < there; i += ROWS * AT_ONCE) {
            uint4 k[AT_ONCE], v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int row = min(i + j * ROWS + lane / UNITS, there - 1);
                const T* from = qkv + (first + row) * (C + 2 * KV) + C + column;
                k[j] = __ldcg(reinterpret_cast<const uint4*>(from));
                v[j] = __ldcg(reinterpret_cast<const uint4*>(from + KV));
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int row = i + j * ROWS + lane / UNITS;
                const long long to = (long long)__shfl_sync(0xffffffffu, place, row) * KV + column;
                if (to < 0 || row >= there) continue;
                *reinterpret_cast<uint4*>(cache.k + to) = k[j];
                *reinterpret_cast<uint4*>(cache.v + to) = v[j];
            }
        }
    }
}
