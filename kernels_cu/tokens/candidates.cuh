// Finds the smallest logit that top-k and top-p keep. Included by tokens/sample.cu, whose head defines l (a logit after
// bias and penalties) and mass (a token's weight as an integer).
//
// The blocks of a cluster share a row of logits; each block has a part of its columns. Candidates for the smallest l
// kept are found by histograms of (max l - l) / temperature, a quantity that spreads tokens evenly over the bins:
//
//   top-k   for k <= 64, each warp finds its two largest l. Candidates are the tokens whose l is at least the
//           k-th largest of these l. For larger k, candidates are the tokens in the bin of the k-th largest of the
//           threads' maxima, and in bins of larger l
//   top-p   candidates are the tokens in the bin at which the running sum of masses reaches the fraction p of the
//           sum of all masses
//
// If there is at most one candidate per thread, every block sorts all candidates. Otherwise the search continues digit
// by digit of the bits of l, as in a radix sort that follows only the digit of the last token kept. Bins hold token
// counts or masses as 64-bit integers, so that the order of additions does not matter.
//
// Functions with several callers are not inlined. Otherwise this file would take twice as long to compile as any other
// file, which would delay the first token.
#pragma once
#include "lib/cluster.cuh"
#include "lib/logits.cuh"

#ifndef SAMPLE_THREADS  // threads per block: a power of two, at least 32
#define SAMPLE_THREADS 1024
#endif
#ifndef SAMPLE_CLUSTER  // blocks per row: 1, 2, 4 or 8; more than one needs sm_90
#define SAMPLE_CLUSTER 1
#endif
#ifndef SAMPLE_LOADS  // loads in flight per thread in the first pass
#define SAMPLE_LOADS 10
#endif
#ifndef SAMPLE_CHANGES  // 1: logits get biases (-inf excludes a token); 2: also count penalties
#define SAMPLE_CHANGES 0
#endif
#ifndef SAMPLE_MASKS  // 1: rows may have a mask of allowed tokens; other tokens are excluded
#define SAMPLE_MASKS 0
#endif
#ifndef SAMPLE_DRAFTS  // 1: several rows per sequence; the state is not changed, token is (M)
#define SAMPLE_DRAFTS 0
#endif
#ifndef SAMPLE_LIST  // maximum number of candidates that are sorted, at most one per thread
#define SAMPLE_LIST SAMPLE_THREADS
#endif

typedef unsigned long long u64;

constexpr int THREADS = SAMPLE_THREADS, WARPS = THREADS / 32, RANKS = SAMPLE_CLUSTER;
constexpr bool CHANGED = SAMPLE_CHANGES > 0, COUNTED = SAMPLE_CHANGES > 1, DRAFTS = SAMPLE_DRAFTS > 0;
constexpr bool MASKED = SAMPLE_MASKS > 0;
constexpr int PLACES = 128;           // entries of `changes` (tokens/sample.cu), two floats each
constexpr int CHANGES = 2 * PLACES + 2;  // floats of `changes`: the entries and two penalties
constexpr int PASS = 1024;            // threads of the largest block, in whose order all blocks add in the first pass
constexpr int SHARE = PASS / RANKS;   // number of the PASS threads whose sums one block computes
constexpr int LATER = 7;              // loads in flight in later passes, where more registers are in use
constexpr int FIRST = SAMPLE_LOADS, LIST = SAMPLE_LIST;
constexpr int PARTS = THREADS > 128 ? THREADS / 128 : 1;  // threads that compare a candidate with others
constexpr int LISTED = LIST < THREADS / PARTS ? LIST : THREADS / PARTS;  // maximum number of a few candidates
constexpr int BINS = 2048;            // bins of a histogram: 11 bits
constexpr float REACH = 28.0f;        // a token's mass is 0 if (max - l) / temperature is at least 27.73
constexpr float NEAR = 8.0f;          // three quarters of the bins are for (max - l) / temperature below NEAR
constexpr float FINE = BINS / 4 * 3, COARSE = (BINS - FINE) / FINE * NEAR / (REACH - NEAR);
constexpr float ALIVE = BINS - 1;     // tokens at bin positions from ALIVE on have no mass
constexpr int PASS_WARPS = 32;        // warps of PASS threads
constexpr float UNIT = 1099511627776.0f;  // 2^40: mass of the token with the largest l
static_assert(THREADS >= 32 && THREADS <= 1024 && (THREADS & (THREADS - 1)) == 0, "a power of two");
static_assert(LIST <= THREADS, "a thread sorts one candidate");

struct Shared {
    unsigned low[BINS], high[BINS];  // a 64-bit histogram in two 32-bit halves: shared memory has no 64-bit atomics
    u64 parts[WARPS], rest;
    u64 totals[RANKS];               // the sum of each block of the row
    float list[LIST];                // candidates of the row
    float own[RANKS > 1 ? LIST : 1];  // candidates of this block
    int ids[LISTED], own_ids[RANKS > 1 ? LISTED : 1];  // their tokens, if they are few
    u64 masses[LISTED];              // masses of a few candidates
    float l[PASS_WARPS];             // largest l of each of the PASS_WARPS warps
    int id[PASS_WARPS];
    float second[PASS_WARPS];        // top-k: largest l of each warp in other lanes than the lane with the maximum
    Online online[PASS_WARPS];
    int counts[RANKS];               // number of candidates in each block
    int count, digit, token, bad;
    float cut;
    u64 random;
};

struct Row {
    const float* x;             // (V)
    const unsigned char* marks;  // (V), or null if no penalty or bias changes a logit of the row
    int V;
    float penalty, less;        // repetition_penalty and its reciprocal
    float frequency, presence;  // frequency_penalty, presence_penalty
    float max, inverse, scale;  // maximum of l; inverse: 1 / temperature; scale: bins per unit of l, near the maximum
    int first, end;             // columns of this block
    const float* changes;       // (CHANGES); shifted by one float, to the second biases, after min_new_tokens
    const int* counts;          // (V): how often each token was sampled; null if no penalty needs it
    const int* drafted;         // (draft tokens): tokens that count as sampled
    int drafts;
    const int* allowed;         // (ceil(V / 32)): a bit per token, 0 for excluded tokens; null: all tokens are allowed

    __device__ __forceinline__ float below(float l) const { return l == max ? 0.0f : max - l; }  // inf - inf is NaN
    __device__ __forceinline__ float position(float l) const {
        const float fine = below(l) * scale;
        return fine < FINE ? fine : FINE + (fine - FINE) * COARSE;
    }
    __device__ __forceinline__ float weight(float l) const { return expf(-below(l) * inverse); }
    __device__ __forceinline__ u64 mass(float l) const { return (u64)(weight(l) * UNIT); }
    // Excludes tokens that the mask does not allow. l: logits of columns first, first + step, ...
    template <int COUNT>
    __device__ __forceinline__ void exclude(float (&l)[COUNT], int first, int step) const {
        if (MASKED && allowed) {
            int words[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) words[i] = allowed[min(first + i * step, V - 1) / 32];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (!(words[i] >> (first + i * step) % 32 & 1)) l[i] = -INFINITY;
            }
        }
    }
    // Returns the logit of a column after bias and penalties. Products are rounded explicitly, as in NumPy.
    __device__ __forceinline__ float changed(float x, unsigned char marks, int column) const {
        if (CHANGED && marks > 1) {
            const float bias = changes[marks & ~1];
            x = bias == -INFINITY ? bias : x + bias;
        }
        int more = 0;
        for (int i = 0; DRAFTS && i < drafts; ++i) more += drafted[i] == column;
        const bool occurred = more || (CHANGED ? marks % 2 : marks);
        x *= occurred ? x > 0.0f ? less : penalty : 1.0f;
        if (!COUNTED || !counts || !occurred) return x;
        const int count = counts[column] + more;  // 0 for a token that occurs only in the prompt
        return count ? x - __fmul_rn(frequency, (float)count) - presence : x;
    }
};

// Calls f(l) for columns first, first + step, ... of this block, LATER columns at a time. The array l has the logits of
// these columns, or -inf for columns from `end` on.
template <typename F>
__device__ __forceinline__ void visit(const Row& row, int first, int end, int step, F f) {
    for (; first < end; first += LATER * step) {
        float l[LATER];
        load_columns(row.x + first, end - first, step, -INFINITY, l);
        if (row.marks) {
            unsigned char marks[LATER];
            load_columns(row.marks + first, end - first, step, (unsigned char)0, marks);
#pragma unroll
            for (int i = 0; i < LATER; ++i) l[i] = row.changed(l[i], marks[i], first + i * step);
        }
        row.exclude(l, first, step);
        f(l);
    }
}

// --- the blocks of a row --------------------------------------------------------------------------------------------

__device__ __forceinline__ int rank_in_row() { return RANKS > 1 ? rank_in_cluster() : 0; }

template <typename E>
__device__ __forceinline__ E* in_block(E* here, int rank) {
    return RANKS > 1 ? in_block_of_cluster(here, rank) : here;
}

// A barrier for the threads of all blocks of the row, which makes their writes visible.
__device__ __forceinline__ void sync_row() {
    if (RANKS > 1) {
        release_to_cluster();
        acquire_from_cluster();
    } else {
        __syncthreads();
    }
}

// Returns the sum of `total` over the blocks before this block. Replaces `total`, a value of this block, by its sum
// over all blocks.
__device__ __forceinline__ u64 before_block(u64& total, Shared& s) {
    if (RANKS == 1) return 0;
    const int rank = rank_in_row();
    if (threadIdx.x < RANKS) *in_block(&s.totals[rank], threadIdx.x) = total;
    sync_row();
    u64 before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < RANKS; ++i) {
        if (i < rank) before += s.totals[i];
        total += s.totals[i];
    }
    return before;
}

// --- sums over a block ----------------------------------------------------------------------------------------------

struct Scan {
    u64 before, total;  // sum over the threads before this one; sum over all threads
};

__device__ __forceinline__ u64 scan_warp(u64 value) {  // inclusive sum over the lanes
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(0xffffffffu, value, distance);
        if (threadIdx.x % 32 >= distance) value += other;
    }
    return value;
}

__device__ __noinline__ Scan scan_block(u64 value, Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 own = scan_warp(value);
    if (lane == 31) s.parts[warp] = own;
    __syncthreads();
    const u64 part = lane < WARPS ? s.parts[lane] : 0, all = scan_warp(part);
    const u64 before = __shfl_sync(0xffffffffu, all - part, warp), total = __shfl_sync(0xffffffffu, all, 31);
    __syncthreads();  // all threads have read `parts`, which the next call overwrites
    return {before + own - value, total};
}

// --- histograms -----------------------------------------------------------------------------------------------------

// Returns a fraction p of a mass, rounded up, and at least 1.
__device__ __forceinline__ u64 part_of(float p, u64 mass) {
    const u64 part = (u64)(p * 18446744073709551616.0f);  // p 2^64
    const u64 need = __umul64hi(part, mass) + (part * mass != 0);
    return need > 0 ? need : 1;
}

__device__ __forceinline__ void count(Shared& s, int bin) { atomicAdd(&s.low[bin], 1); }

__device__ __forceinline__ void add(Shared& s, int bin, u64 value) {
    const unsigned low = (unsigned)value, before = atomicAdd(&s.low[bin], low);
    const unsigned high = (unsigned)(value >> 32) + (before + low < before);
    if (high) atomicAdd(&s.high[bin], high);
}

// digit: a bin, or -1 if no bin was found. need: the requested sum minus the sum of the earlier bins.
struct Found {
    int digit;
    u64 need;
};

// Finds the first bin at which the running sum of bins over all blocks reaches `need`; no bin if the sum of all bins is
// less. Each block adds up a share of the bins. Clears the histogram. p: if not negative, `need` is this fraction of
// the sum of all bins. Arguments and results of functions that are not inlined are values, because a reference would
// put its object in local memory.
__device__ __noinline__ Found find(float p, Shared& s, u64 need) {
    constexpr int MINE = BINS / RANKS, OWN = MINE > THREADS ? MINE / THREADS : 1;  // bins per block; bins per thread
    const int first = rank_in_row() * MINE + threadIdx.x * OWN;
    sync_row();
    u64 own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = 0;
        if (threadIdx.x * OWN < MINE) {
#pragma unroll
            for (int rank = 0; rank < RANKS; ++rank)
                own[i] += (u64)*in_block(&s.high[first + i], rank) << 32 | *in_block(&s.low[first + i], rank);
        }
        sum += own[i];
    }
    const Scan scan = scan_block(sum, s);
    u64 total = scan.total, before = scan.before + before_block(total, s);
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) s.high[bin] = s.low[bin] = 0;
    if (p >= 0.0f) need = part_of(p, total);
    const bool reached = need <= total;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (reached && before < need && need <= before + own[i]) {
            for (int rank = 0; rank < RANKS; ++rank) {
                *in_block(&s.digit, rank) = first + i;
                *in_block(&s.rest, rank) = need - before;
            }
        }
        before += own[i];
    }
    sync_row();
    return reached ? Found{s.digit, s.rest} : Found{-1, need};
}

// Candidates: tokens with a position in the histogram in [from, limit) and a logit l >= cut.
struct Candidates {
    float cut, from, limit;

    __device__ __forceinline__ bool has(const Row& row, float l) const {
        const float position = row.position(l);
        return from <= position && position < limit && l >= cut;
    }
};

// Returns the number of the row's candidates. If it is at most LIST, they are in s.list; up to LISTED, their tokens are
// in s.ids.
__device__ __noinline__ int gather(Candidates among, const Row& row, Shared& s) {
    float* own = RANKS > 1 ? s.own : s.list;
    int* own_ids = RANKS > 1 ? s.own_ids : s.ids;
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    int id = row.first + threadIdx.x;
    visit(row, id, row.end, THREADS, [&](const float(&l)[LATER]) {
#pragma unroll
        for (int i = 0; i < LATER; ++i, id += THREADS) {
            if (!among.has(row, l[i])) continue;
            const int at = atomicAdd(&s.count, 1);
            if (at < LIST) own[at] = l[i];
            if (at < LISTED) own_ids[at] = id;
        }
    });
    __syncthreads();
    if (RANKS == 1) return s.count;
    if (threadIdx.x < RANKS) *in_block(&s.counts[rank_in_row()], threadIdx.x) = s.count;
    sync_row();
    int all = 0, rank = 0, before = 0;
#pragma unroll
    for (int other = 0; other < RANKS; ++other) {
        if (threadIdx.x >= all) rank = other, before = all;
        all += s.counts[other];
    }
    if (all <= LIST && threadIdx.x < all) s.list[threadIdx.x] = *in_block(&s.own[threadIdx.x - before], rank);
    if (all <= LISTED && threadIdx.x < all) s.ids[threadIdx.x] = *in_block(&s.own_ids[threadIdx.x - before], rank);
    return all;  // select() needs no barrier: a thread reads only the candidate that it copied
}

// Sorts the candidates in s.list and returns the first candidate at which the running sum reaches `need`; `need` must
// not exceed the total. Candidates are exchanged through the memory of the histogram, which must be empty.
__device__ __noinline__ float select(bool masses, const Row& row, Shared& s, int count, u64 need) {
    const int i = threadIdx.x;
    float l = i < count ? s.list[i] : -INFINITY;
#pragma unroll 1
    for (int size = 2; size < 2 * count; size *= 2) {  // sorts runs of `size` candidates, largest l first
#pragma unroll 1
        for (int distance = size / 2; distance > 0; distance /= 2) {
            float other;
            if (distance < 32) {
                other = __shfl_xor_sync(0xffffffffu, l, distance);
            } else {
                s.low[i] = __float_as_int(l);
                __syncthreads();
                other = __int_as_float(s.low[i ^ distance]);
                __syncthreads();
            }
            const bool larger = ((i & distance) == 0) == ((i & size) == 0);
            l = larger ? fmaxf(l, other) : fminf(l, other);
        }
    }
    s.low[i] = 0;
    const u64 own = i < count ? masses ? row.mass(l) : 1 : 0;
    const u64 before = scan_block(own, s).before;
    if (before < need && need <= before + own) s.cut = l;
    __syncthreads();
    return s.cut;
}

// Returns a rank for l, as an unsigned integer: a larger l has a smaller rank.
__device__ __forceinline__ unsigned rank_of(float l) {
    const int bits = __float_as_int(l);
    return bits < 0 ? bits : bits ^ 0x7fffffff;
}

__device__ __forceinline__ float of_rank(unsigned rank) {
    return __int_as_float(rank >> 31 ? rank : rank ^ 0x7fffffff);
}

// Returns the smallest l of the fewest largest candidates that together have `need` tokens or, with p >= 0, a fraction
// p of the candidates' mass. Returns -inf if there are fewer candidates.
__device__ __noinline__ float min_kept(const Row& row, Shared& s, Candidates among, u64 need, float p) {
    const bool masses = p >= 0.0f;
    u64 rank = 0;
    for (int top = 43, shift = 32; top > 0; top = shift, shift = shift > 11 ? shift - 11 : 0) {
        const bool first = shift == 32;  // the first digit is the bin position, later digits are bits of l
        visit(row, row.first + threadIdx.x, row.end, THREADS, [&](const float(&l)[LATER]) {
#pragma unroll
            for (int i = 0; i < LATER; ++i) {
                const u64 own = rank_of(l[i]);
                if (!among.has(row, l[i]) || (!first && own >> top != rank)) continue;
                const int bin = first ? (int)row.position(l[i]) : (int)(own >> shift) & ((1 << (top - shift)) - 1);
                masses ? add(s, bin, row.mass(l[i])) : count(s, bin);
            }
        });
        const Found found = find(first ? p : -1.0f, s, need);
        if (found.digit < 0) return -INFINITY;
        need = found.need;
        if (first) {
            among.from = found.digit;
            among.limit = found.digit + 1;
            const int here = gather(among, row, s);
            if (here <= LIST) return select(masses, row, s, here, need);
        } else {
            rank = rank << (top - shift) | found.digit;
        }
    }
    return of_rank((unsigned)rank);
}
