// Selects the tile of queries (some rows of one head of one sequence) that a block of the mma.sync attention computes.
//
// Sequences are packed rows: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, or without cu_seqlens rows b *
// seq_len .. (b + 1) * seq_len - 1. Blocks start roughly in the order of their index. Heads are therefore divided into
// groups of `together` heads, and tiles are assigned to blocks in this order:
//
//   all tiles of one group, then the tiles of the next group   keys and values of a group fit in the L2 cache
//   within a group, first the last tile of every head          with a causal mask, the last tile has the most work
#pragma once

struct Job {
    long long row;  // first row of the sequence
    int length;     // rows of the sequence
    int first;      // index of the block's first query in the sequence; the block has no work if first >= length
    int head;
    int sequence;
};

// Returns the work of this block. seq_len: length of the longest sequence. queries: queries per block. The grid has
// ceil(seq_len / queries) * n_head * B blocks.
__device__ __forceinline__ Job choose_job(const int* cu_seqlens, int B, int seq_len, int n_head, int together,
                                          int queries) {
    const int tiles = (seq_len - 1) / queries + 1;
    const int band = blockIdx.x / (together * tiles), index = blockIdx.x - band * together * tiles;
    const int heads = min(together, B * n_head - band * together);
    const int head = band * together + index % heads, b = head / n_head;
    const int first = (tiles - 1 - index / heads) * queries;
    if (!cu_seqlens) return {(long long)b * seq_len, seq_len, first, head % n_head, b};
    const int start = __ldcg(cu_seqlens + b);
    return {start, __ldcg(cu_seqlens + b + 1) - start, first, head % n_head, b};
}
