// The tiles of QUERIES queries that a block of attention/hopper.cu, attention/hopper_alternate.cu or
// attention/hopper_two_part.cu processes, one after the other. The including file defines QUERIES.
//
// Sequences are packed rows: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, or without cu_seqlens rows b
// seq_len .. (b + 1) seq_len - 1. Block i of n takes tiles i, 2n - 1 - i, 2n + i, .. in this order:
//
//   the tiles of `together` heads are consecutive            their keys and values fit in the L2 cache
//   within these, the last tile of every head comes first    with a causal mask it has the most work
#pragma once

struct Work {
    const int* cu_seqlens;
    const int B, seq_len, n_head, together;
    const int own, blocks;  // which block of how many
    int round = 0;
    // Of the tile: the first row of its sequence in out and in the map; the length of the sequence; its first query.
    long long row;
    int map_row, map_z, length, first, head;

    __device__ __forceinline__ bool next() {
        const int tiles = (seq_len - 1) / QUERIES + 1, heads = n_head * B;
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
            if (cu_seqlens) {
                map_row = __ldcg(cu_seqlens + b), map_z = 0, row = map_row;
                length = __ldcg(cu_seqlens + b + 1) - map_row;
            }
            if (first < length) return true;
        }
    }
};
