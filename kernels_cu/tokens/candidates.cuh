// The smallest logit kept by top-k and top-p, searched among the candidates of a row. Part of tokens/sample.cu.
//
// The search goes digit by digit, as in a radix sort, but it follows only the digit that contains the last token kept.
// The first digit is that of (max l - l) / temperature, which spreads tokens evenly over the bins of a histogram; the
// following digits are taken from the bits of l. Bins hold token counts or masses as 64-bit integers.
//
// Functions that are called from several places are not inlined: the file would compile twice as long as any other,
// and the first token would wait for it.
#pragma once
#include "tokens/logits.cuh"

#ifndef SAMPLE_THREADS  // of a block: a power of two, at least 32
#define SAMPLE_THREADS 1024
#endif
#ifndef SAMPLE_LOADS  // loads that a thread has in flight in the first pass
#define SAMPLE_LOADS 10
#endif
#ifndef SAMPLE_LATER  // and in later passes, where more registers are in use
#define SAMPLE_LATER 7
#endif
#ifndef SAMPLE_LIST  // capacity of the candidate list in shared memory
#define SAMPLE_LIST 4096
#endif

typedef unsigned long long u64;

constexpr int THREADS = SAMPLE_THREADS, WARPS = THREADS / 32;
constexpr int PASS = 1024;            // threads of the largest block: the first pass adds up as they do
constexpr int TURNS = PASS / THREADS;  // that a smaller one takes for it
constexpr int FIRST = SAMPLE_LOADS, LATER = SAMPLE_LATER, LIST = SAMPLE_LIST;
constexpr int BINS = 2048;            // of a histogram: 11 bits
constexpr int OWN = BINS / THREADS;   // bins of a thread
constexpr float REACH = 28.0f;        // mass is 0 where (max - l) / temperature is at least 27.73
constexpr float ALIVE = BINS - 1;     // positions from here on have no mass
constexpr float UNIT = 1099511627776.0f;  // 2^40
static_assert(THREADS >= 32 && THREADS <= 1024 && (THREADS & (THREADS - 1)) == 0, "a power of two");

struct Shared {
    unsigned low[BINS], high[BINS];  // a 64-bit histogram in two halves: shared memory has no 64-bit atomics
    u64 parts[WARPS], rest;
    float list[LIST];
    float l[WARPS];
    int id[WARPS];
    Online online[32];  // of each warp of a pass
    int count, digit, token, bad;
    float raw;
    u64 random;
};

struct Row {
    const float* x;             // (V)
    const unsigned char* seen;  // (V), null if the penalty is 1
    int V;
    float penalty, less;        // the penalty and its reciprocal
    float max, inverse, scale;  // maximum of l; 1 / temperature; bins per unit of l

    __device__ __forceinline__ float below(float l) const { return l == max ? 0.0f : max - l; }  // also if both are inf
    __device__ __forceinline__ float position(float l) const { return below(l) * scale; }
    __device__ __forceinline__ float weight(float l) const { return expf(-below(l) * inverse); }
    __device__ __forceinline__ u64 mass(float l) const { return (u64)(weight(l) * UNIT); }
};

// Calls f(column of the first, logits, l) for every COUNT of the columns first, first + step ... before `end`. AHEAD:
// the next ones are loaded before that.
template <int COUNT, bool AHEAD = false, typename F>
__device__ __forceinline__ void visit(const Row& row, int first, int end, int step, F f) {
    float next[COUNT];
    if (AHEAD) load_columns(row.x + first, end - first, step, -INFINITY, next);
    for (; first < end; first += COUNT * step) {
        float raw[COUNT], l[COUNT];
        if (!AHEAD) load_columns(row.x + first, end - first, step, -INFINITY, next);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) l[i] = raw[i] = next[i];
        const int later = first + COUNT * step;
        if (AHEAD && later < end) load_columns(row.x + later, end - later, step, -INFINITY, next);
        if (row.seen) {
            unsigned char seen[COUNT];
            load_columns(row.seen + first, end - first, step, (unsigned char)0, seen);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) l[i] = raw[i] * (seen[i] ? raw[i] > 0.0f ? row.less : row.penalty : 1.0f);
        }
        f(first, raw, l);
    }
}

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
    __syncthreads();  // before the next call writes parts
    return {before + own - value, total};
}

__device__ __forceinline__ void add(Shared& s, int bin, u64 value) {
    const unsigned low = (unsigned)value, before = atomicAdd(&s.low[bin], low);
    const unsigned high = (unsigned)(value >> 32) + (before + low < before);
    if (high) atomicAdd(&s.high[bin], high);
}

// Finds the first bin at which the running sum reaches `need`, and the part of `need` that this bin contributes. Clears
// the histogram. Returns false if the sum of all bins is less than `need`.
__device__ __noinline__ bool find(Shared& s, u64 need, int& digit, u64& rest) {
    __syncthreads();
    u64 own[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int bin = threadIdx.x * OWN + i;
        own[i] = (u64)s.high[bin] << 32 | s.low[bin];
        s.high[bin] = s.low[bin] = 0;
        sum += own[i];
    }
    const Scan scan = scan_block(sum, s);
    u64 before = scan.before;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (before < need && need <= before + own[i]) {
            s.digit = threadIdx.x * OWN + i;
            s.rest = need - before;
        }
        before += own[i];
    }
    __syncthreads();
    digit = s.digit;
    rest = s.rest;
    return need <= scan.total;
}

// Tokens with a position in [from, limit) and l >= cut. They are in the list if it has room for them, else in the row.
struct Candidates {
    float from = 0.0f, limit = ALIVE, cut = -INFINITY;
    bool listed = false;
    int count = 0;  // length of the list, if listed

    __device__ __forceinline__ bool has(const Row& row, float l) const {
        const float position = row.position(l);
        return from <= position && position < limit && l >= cut;
    }

    template <typename F>
    __device__ __forceinline__ void each(const Row& row, const Shared& s, F f) const {
        if (listed) {
            for (int i = threadIdx.x; i < count; i += THREADS) {
                if (has(row, s.list[i])) f(s.list[i]);
            }
        } else {
            visit<LATER>(row, threadIdx.x, row.V, THREADS, [&](int, const float*, const float* l) {
#pragma unroll
                for (int i = 0; i < LATER; ++i) {
                    if (has(row, l[i])) f(l[i]);
                }
            });
        }
    }

    // Counts the candidates and stores them in the list if they fit. masses: also returns the masses of the whole row
    // and of the candidates.
    __device__ __noinline__ void gather(bool masses, const Row& row, Shared& s, u64& of_row, u64& of_these) {
        __syncthreads();
        if (threadIdx.x == 0) s.count = 0;
        __syncthreads();
        u64 all = 0, these = 0;
        visit<LATER>(row, threadIdx.x, row.V, THREADS, [&](int, const float*, const float* l) {
#pragma unroll
            for (int i = 0; i < LATER; ++i) {
                const u64 mass = masses ? row.mass(l[i]) : 0;
                all += mass;
                if (!has(row, l[i])) continue;
                these += mass;
                const int at = atomicAdd(&s.count, 1);
                if (at < LIST) s.list[at] = l[i];
            }
        });
        __syncthreads();
        count = s.count;
        listed = count <= LIST;
        if (!masses) return;
        of_row = scan_block(all, s).total;
        of_these = scan_block(these, s).total;
    }

    __device__ __noinline__ u64 mass(const Row& row, Shared& s) const {
        u64 sum = 0;
        each(row, s, [&](float l) { sum += row.mass(l); });
        return scan_block(sum, s).total;
    }
};

// The rank of larger l is smaller.
__device__ __forceinline__ unsigned rank_of(float l) {
    const int bits = __float_as_int(l);
    return bits < 0 ? bits : bits ^ 0x7fffffff;
}

__device__ __forceinline__ float of_rank(unsigned rank) {
    return __int_as_float(rank >> 31 ? rank : rank ^ 0x7fffffff);
}

// Returns the smallest l of the fewest largest candidates whose sum reaches `need`. The sum is their number or, with
// masses, their mass; `need` is at most the sum of all candidates.
__device__ __noinline__ float least_kept(bool masses, const Row& row, Shared& s, Candidates among, u64 need) {
    int digit;
    u64 rank = 0, none;
    for (int top = 43, shift = 32; top > 0; top = shift, shift = shift > 11 ? shift - 11 : 0) {
        const bool first = shift == 32;  // the digit of the position, before those of the bits
        among.each(row, s, [&](float l) {
            const u64 own = rank_of(l);
            if (!first && own >> top != rank) return;
            const int bin = first ? (int)row.position(l) : (int)(own >> shift) & ((1 << (top - shift)) - 1);
            add(s, bin, masses ? row.mass(l) : 1);
        });
        find(s, need, digit, need);
        if (first) {
            among.from = digit;
            among.limit = digit + 1;
            if (!among.listed) among.gather(false, row, s, none, none);
        } else {
            rank = rank << (top - shift) | digit;
        }
    }
    return of_rank((unsigned)rank);
}
