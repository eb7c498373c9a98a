// The tiles of QUERIES queries that a block of attention/prompt/wgmma.cu, attention/prompt/wgmma_alternate.cu or
// attention/prompt/wgmma_hi_lo.cu processes, one after the other. The including file defines QUERIES.
//
// Sequences are packed rows: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, or without cu_seqlens rows b *
// seq_len .. (b + 1) * seq_len - 1. With ATT_CACHED, the first row of sequence b is at position start[b], and the keys
// of earlier positions are in a kv_cache. Tiles still begin at positions that are multiples of QUERIES, so a row has
// the same bits as without a cache; rows before position start[b] are not stored. Heads are divided into groups of
// `together` heads, and tiles are numbered in the order below. Block i of n processes tiles i, 2n - 1 - i, 2n + i, ...
//
//   all tiles of one group, then the tiles of the next group   keys and values of a group fit in the L2 cache
//   within a group, first the last tile of every head          with a causal mask, the last tile has the most work
#pragma once

#ifndef ATT_CACHED
#define ATT_CACHED 0
#endif

constexpr bool CACHED = ATT_CACHED;

struct Work {
    const int* cu_seqlens;
    const int B, seq_len, n_head, together;
    const int own, blocks;             // index of this block; number of blocks
    const int* const start = nullptr;  // start, N and n_ctx: set with ATT_CACHED
    const int N = 0, n_ctx = 0;        // total rows of all sequences; positions per sequence in the kv_cache
    int round = 0;
    // The current tile. row: index, among the rows of out, of position 0 of the tile's sequence. map_row, map_z: row
    // and matrix of position 0 in the tensor map. length: end position of the sequence. first: position of the tile's
    // first query.
    long long row;
    int map_row, map_z, length, first, head;
    int begin = 0;  // position, in the tile's sequence, of the sequence's first new row

    __device__ __forceinline__ bool next() {
        const int tiles = (seq_len - 1 + (CACHED ? QUERIES - 1 : 0)) / QUERIES + 1, heads = n_head * B;
        for (;;) {
            const int index = round * blocks + (round & 1 ? blocks - 1 - own : own);
            if (index >= heads * tiles) return false;
            ++round;
            const int band = index / (together * tiles), rest = index - band * together * tiles;
            const int side = min(together, heads - band * together);
            const int b = (band * together + rest % side) / n_head;
            head = (band * together + rest % side) % n_head;
            first = (tiles - 1 - rest / side) * QUERIES;
            row = (long long)b * seq_len, length = seq_len, map_row = 0, map_z = b;
            if (CACHED) {  // plain loads, which hit the L1 cache: most sequences have no new rows and are skipped
                map_row = cu_seqlens[b], length = cu_seqlens[b + 1] - map_row;
                if (length <= 0) continue;
                begin = max(start[b], 0), row = map_row;  // values are clamped to stay within the arrays
                length = map_row < 0 ? 0 : min(begin + min(length, N - map_row), n_ctx);
                if (length <= begin) continue;
                first += begin / QUERIES * QUERIES, row -= begin, map_row -= begin;
            } else if (cu_seqlens) {
                map_row = __ldcg(cu_seqlens + b), map_z = 0, row = map_row;
                length = __ldcg(cu_seqlens + b + 1) - map_row;
            }
            if (first < length) return true;
        }
    }
};
