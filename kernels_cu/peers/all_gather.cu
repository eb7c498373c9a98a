// Gathers rows whose columns several GPUs have computed: every GPU gets whole rows.
//
//   all_gather: stores words with the number of their round into the memory of the other GPUs, without a flag. With
//       GATHER_OPERAND, out holds each value as 16-bit terms (lib/operands.cuh), for the products of decoding
//   all_gather_rows: many rows: stores words alone, and a flag after the rows of a block
//
//   out[m, n] = share_g[m, n - first_g] (+ residual[m, n])      g: the GPU that has column n
//
// A round is one exchange of columns between all GPUs. Each GPU has a peer buffer, into which the other GPUs store the
// words (4 bytes) of their columns. A peer buffer has an area for each kernel, and flags. Each area has two halves, and
// so have the flags. Even rounds use the first half, odd rounds the second half.
//
// all_gather: an entry of 8 bytes is a word and the number of its round. A GPU reads its own peer buffer until every
// entry has the number of this round. The 8 bytes of an entry are stored, and loaded, in one access. A word whose
// number has arrived is therefore complete, and no fence is needed. norms/rmsnorm_stream.cu has a kernel that
// all-gathers in this way and normalizes the rows.
//
// all_gather_rows: a block stores its words, then a fence, then the number of the round as its flag. The block of the
// same index on another GPU waits for this flag, then reads the words. all_gather_rows sends half as many bytes as
// `all_gather`, but waits for the fence.
//
// Rounds r and r + 2 use the same half. Storing in round r + 2 is safe: a GPU stores its words of round r + 2 only
// after its own round r + 1 has ended. That round ended only after all other GPUs had stored their words of round
// r + 1. Each of these GPUs stored them after its own round r had ended. It had then read all words and flags of
// round r from its own peer buffer.
//
// The two kernels have separate areas: in a shared area, `all_gather` could take words of all_gather_rows, which have
// no number, for an entry with the number of a later round.
//
// Attention and the products of few rows can store their words in the other peer buffers themselves (Mail in
// lib/exchange.cuh). The words are then on their way before all blocks of the kernel have ended. The next all-gather
// must be the `all_gather` or rmsnorm_gathered of these columns, and only receives. Such a kernel, too, stores words
// only after its GPU's previous round has ended: it waits for all earlier kernels first.
//
// A GPU waits for other GPUs while its blocks hold multiprocessors. All blocks store before they wait, and the grid is
// small enough for all blocks to run at the same time. A kernel that waits longer than PATIENCE sets *abort, a flag in
// the memory of the host. Threads that wait read this flag at intervals; if it is set, they stop, and the output of the
// kernel is not valid. The host then raises an error, and clears the peer buffers before the next all-gather.
//
// The number of the round is 32 bits: after 2^32 rounds a number recurs, in a peer buffer that has long been
// overwritten.
//
// Measured: docs/experiments.md#gather, in models docs/several-gpus.md
//
// grid (blocks), block (GATHER_THREADS). T: any type. S, N and first count words, a multiple of 4 in all_gather_rows.
#include "lib/exchange.cuh"
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"  // includes lib/operands.cuh

#ifndef GATHER_WIDTH  // words that a thread of `all_gather` sends or receives at a time, 1 or 2; divides S, N and first
#define GATHER_WIDTH 2
#endif
#ifndef GATHER_OPERAND  // format of out: a kind of terms (16-bit parts of floats, lib/operands.cuh); 0: no terms
#define GATHER_OPERAND 0
#endif
static_assert(!GATHER_OPERAND || (GATHER_WIDTH == 2 && sizeof(T) == 4), "a thread has a pair of floats");
#define GATHER_THREADS 512

// Stores the terms of the values n and n + 1 of row m, and with OPERAND_SUMS the sum of their chunk of 32 values.
// Neighbouring lanes have neighbouring pairs.
__device__ __forceinline__ void store_terms(float* out, const unsigned* pair, float scale, int m, int n, int M, int N) {
    const float first = __uint_as_float(pair[0]), second = __uint_as_float(pair[1]);
    const unsigned high = store_term_pair<GATHER_OPERAND>(out, first, second, inverse_of(scale), m, n, M, N);
    if constexpr (OPERAND_SUMS) {
        float sum = sum_of(high);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
#pragma unroll
        for (int distance = 8; distance > 1; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (threadIdx.x % 16 == 0) store_sum(out + (long long)M * N / 2, sum, m, n, M, N);
    }
}

// Launched by operation (variant): all_gather (words)
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 2) all_gather(
    const T* shard,         // (M, S): the columns of this GPU
    const float* residual,  // (M, N) or null
    T* out,                 // (M, N)
    int* abort,             // set to 1 to end the waits of all GPUs
    long long* own,         // peer buffer of this GPU; then the peer buffers of the other GPUs, and null
    long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5, long long* to_6,
    long long* to_7,
    int M,         // rows
    int S,         // words of a row of `shard`
    int N,         // words of a row of `out`
    int first,     // first word of this GPU in a row of `out`
    int capacity,  // entries in half the area of `all_gather`, at least M N
    float scale,   // scale of out, used if GATHER_OPERAND selects hi/lo terms
    int parts) {   // TO_PEERS, FROM_PEERS or both: FROM_PEERS if other kernels have sent the columns
    let_next_start();
    wait_for_previous();
    long long* const others[MAX_OTHERS] = {to_1, to_2, to_3, to_4, to_5, to_6, to_7};
    const unsigned round = next_round(own);
    const long long half = first_entry(round, capacity);
    const int thread = blockIdx.x * GATHER_THREADS + threadIdx.x, threads = gridDim.x * GATHER_THREADS;
    const unsigned* from = reinterpret_cast<const unsigned*>(shard);
    unsigned words[GATHER_WIDTH];
    if (parts & TO_PEERS) {
        for (int i = thread * GATHER_WIDTH; i < M * S; i += threads * GATHER_WIDTH) {
            const int m = i / S, at = m * N + first + (i - m * S);
#pragma unroll
            for (int w = 0; w < GATHER_WIDTH; ++w) words[w] = __ldcg(from + i + w);
#pragma unroll
            for (int g = 0; g < OTHERS; ++g) store_words<GATHER_WIDTH>(others[g] + half + at, words, round);
        }
    }
    if (!(parts & FROM_PEERS)) return;
    store_round(own, round);
    const long long begun = clock64();
    bool ends = false;
    for (int i = thread * GATHER_WIDTH; i < M * N && !ends; i += threads * GATHER_WIDTH) {
        const int m = i / N, n = i - m * N;
        if (n >= first && n < first + S) {
#pragma unroll
            for (int w = 0; w < GATHER_WIDTH; ++w) words[w] = __ldcg(from + m * S + (n - first) + w);
        } else {
            for (int polls = 1; !receive<GATHER_WIDTH>(own + half + i, words, round) && !ends; ++polls)
                ends = gives_up(polls, abort, begun);
        }
#pragma unroll
        for (int w = 0; w < GATHER_WIDTH; ++w) {
            if (residual != nullptr) words[w] = __float_as_uint(__ldcg(residual + i + w) + __uint_as_float(words[w]));
            if (!GATHER_OPERAND) reinterpret_cast<unsigned*>(out)[i + w] = words[w];
        }
        if constexpr (GATHER_OPERAND) {
            ends = __any_sync(0xffffffffu, ends);  // store_terms() needs all lanes
            store_terms(reinterpret_cast<float*>(out), words, scale, m, n, M, N);
        }
    }
}

// Launched by operation (variant): all_gather (words)
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 2) all_gather_rows(
    const T* shard,  // the arguments up to `first` are as in `all_gather`
    const float* residual,
    T* out,
    int* abort,
    long long* own,
    long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5, long long* to_6,
    long long* to_7,
    int M,
    int S,
    int N,
    int first,
    int capacity,  // entries of half the area of `all_gather`, which is before the area of this kernel
    int most,      // words of half the area of this kernel, at least M N
    int rows,      // rows of a block
    int parts) {
    let_next_start();
    wait_for_previous();
    long long* const others[MAX_OTHERS] = {to_1, to_2, to_3, to_4, to_5, to_6, to_7};
    const unsigned round = next_round(own);
    const long long area = HEADER + 2ll * capacity, half = (long long)(round & 1u) * most;  // entries; words
    const int row = blockIdx.x * rows, count = min(rows, M - row);
    const int flags = (int)(round & 1u) * MAX_OTHERS * MAX_PIECES + blockIdx.x;  // this block's flag for g = 0
    const int4* const from = reinterpret_cast<const int4*>(shard);
    const int in_share = S / 4, in_row = N / 4, mine = first / 4;  // in units of 16 bytes
    if (parts & TO_PEERS) {
        for (int i = threadIdx.x; i < count * in_share; i += GATHER_THREADS) {
            const int4 words = __ldcg(from + row * in_share + i);
            const int at = (row + i / in_share) * in_row + mine + i % in_share;
#pragma unroll
            for (int g = 0; g < OTHERS; ++g)
                reinterpret_cast<int4*>(reinterpret_cast<int*>(others[g] + area) + half)[at] = words;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence_system();
#pragma unroll
            for (int g = 0; g < OTHERS; ++g)
                reinterpret_cast<volatile unsigned*>(others[g] + FLAGS)[flags + g * MAX_PIECES] = round;
        }
    }
    if (!(parts & FROM_PEERS)) return;
    store_round(own, round);
    // The GPU that is g + 1 places before this GPU has this GPU as its other GPU number g, and stores flag number g.
    if (const int g = threadIdx.x; g < OTHERS) {
        const volatile unsigned* const flag = reinterpret_cast<unsigned*>(own + FLAGS) + flags + g * MAX_PIECES;
        const long long begun = clock64();
        for (int polls = 1; *flag != round && !gives_up(polls, abort, begun); ++polls) {
        }
        __threadfence_system();
    }
    __syncthreads();
    const int4* const arrived = reinterpret_cast<const int4*>(reinterpret_cast<const int*>(own + area) + half);
    for (int i = threadIdx.x; i < count * in_row; i += GATHER_THREADS) {
        const int m = row + i / in_row, n = i % in_row, at = row * in_row + i;
        const bool own_column = n >= mine && n < mine + in_share;
        int4 v = __ldcg(own_column ? from + m * in_share + (n - mine) : arrived + at);
        if (residual != nullptr) {
            const float4 r = __ldcg(reinterpret_cast<const float4*>(residual) + at);
            v.x = __float_as_int(r.x + __int_as_float(v.x));
            v.y = __float_as_int(r.y + __int_as_float(v.y));
            v.z = __float_as_int(r.z + __int_as_float(v.z));
            v.w = __float_as_int(r.w + __int_as_float(v.w));
        }
        reinterpret_cast<int4*>(out)[at] = v;
    }
}
