// Selects the queries that a block of the mma.sync attention kernels processes: rows, head and sequence.
//
// Sequences are packed rows: sequence b has rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, or without cu_seqlens rows b
// seq_len .. (b + 1) seq_len - 1. Blocks run roughly in the order of their index. Therefore
//
//   the tiles of `together` heads are consecutive            their keys and values fit in the L2 cache
//   within these, the last tile of every head comes first    with a causal mask it has the most work
#pragma once

struct Job {
    long long row;  // first row of the sequence
    int length;     // rows of the sequence
    int first;      // first query of the block, relative to `row`; no work if >= length
    int head;
    int sequence;
};

// Returns the work of this block. seq_len: length of the longest sequence. The grid has ceil(seq_len / queries) n_head
// B blocks.
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
