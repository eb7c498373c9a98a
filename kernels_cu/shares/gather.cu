// Gathers a row whose columns several GPUs have computed: all GPUs get the whole row.
//
//   gather: words with the number of their round, stored into the memory of every GPU; no flag and no barrier
//   gather_rows: many rows: words alone, and a flag after a few rows
//
//   out[m, n] = share_g[m, n - first_g] (+ residual[m, n])      g: the GPU that has column n
//
// Every GPU runs these kernels at the same places of its stream. Each GPU has a mailbox, into which the other GPUs
// store their columns. A mailbox has an area for each of the two kernels, and an area has two halves, which rounds use
// in turn.
//
// gather: a GPU stores each word (4 bytes), together with the number of the round, as 8 bytes, and reads its own
// mailbox until every word has this number. 8 bytes are stored and loaded at once, so a word that has arrived is
// complete, and needs no fence. gather_rows stores words alone, and after a few rows a flag, which is the number of the
// round: half of the bytes, but a fence more.
//
// A word of round r may be overwritten in round r + 2. When a GPU stores words of round r + 2, its kernel of round
// r + 1 has ended, so words of round r + 1 have come from every GPU. Each of these GPUs had then ended its kernel of
// round r, so all words of round r had been read.
//
// A GPU waits for other GPUs while its blocks hold multiprocessors. All blocks store before they wait, and the grid is
// small enough for all blocks to run at the same time. A kernel that waits longer than PATIENCE sets *abort, which is
// in the memory of the host; all kernels that see it end without a result. The host then raises an error, and clears
// the mailboxes before the next gather.
//
// The number of the round is 32 bits: after 2^32 rounds a number recurs, in a mailbox that has long been overwritten.
//
// Measured in a model: see docs/several-gpus.md.
//
// grid (blocks), block (GATHER_THREADS). T: any type; S, N and first count words, in gather_rows multiples of 4.
#include "lib/overlap.cuh"
#include "lib/storage.cuh"

#ifndef GATHER_WIDTH  // words of a thread at a time, 1 or 2; divides S, N and first
#define GATHER_WIDTH 2
#endif
#define GATHER_THREADS 512
#define OTHERS 7   // most GPUs besides this one
#define ROUND 0    // place in a mailbox of the number of the last round
#define ENDED 1    // place of the number of blocks that have ended in this round
#define FLAGS 16   // flags of gather_rows, (MOST_PIECES) for each GPU, as pairs
#define MOST_PIECES 4096
#define HEADER (FLAGS + (OTHERS + 1) * MOST_PIECES / 2)
#define SEND 1     // `parts`: which parts of the kernel run
#define RECEIVE 2
#define PATIENCE 20000000000ll  // clock cycles, about 10 s
#define POLLS 4096              // attempts between two looks at *abort

// Ends a round when the last block calls it: then all blocks have read the number of the last round.
__device__ __forceinline__ void end_round(long long* own, unsigned round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (atomicAdd(reinterpret_cast<unsigned long long*>(own + ENDED), 1ull) == gridDim.x - 1) {
            own[ENDED] = 0;
            own[ROUND] = round;
        }
    }
}

// Stores words with the number of their round. A word of 8 bytes is stored and loaded as a whole.
template <int COUNT>
__device__ __forceinline__ void send(long long* to, const unsigned* words, unsigned round) {
    unsigned long long stamped[COUNT];
#pragma unroll
    for (int w = 0; w < COUNT; ++w) stamped[w] = (unsigned long long)round << 32 | words[w];
#if defined(__CUDA_ARCH__)
    if constexpr (COUNT == 2)
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                     "l"(stamped[0]), "l"(stamped[1])
                     : "memory");
    else
#endif
#pragma unroll
        for (int w = 0; w < COUNT; ++w) *(volatile unsigned long long*)(to + w) = stamped[w];
}

// Loads words that another GPU may be storing. Returns whether all of them have come.
template <int COUNT>
__device__ __forceinline__ bool receive(const long long* from, unsigned* words, unsigned round) {
    unsigned long long found[COUNT];
#if defined(__CUDA_ARCH__)
    if constexpr (COUNT == 2)
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(found[0]), "=l"(found[1])
                     : "l"(__cvta_generic_to_global(from))
                     : "memory");
    else
#endif
#pragma unroll
        for (int w = 0; w < COUNT; ++w) found[w] = *(const volatile unsigned long long*)(from + w);
    bool all = true;
#pragma unroll
    for (int w = 0; w < COUNT; ++w) {
        words[w] = (unsigned)found[w];
        all = all && (unsigned)(found[w] >> 32) == round;
    }
    return all;
}

__device__ __forceinline__ bool gives_up(volatile int* abort, long long begun) {
    if (*abort == 0 && clock64() - begun < PATIENCE) return false;
    *abort = 1;
    return true;
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 2) gather(
    const T* share,         // (M, S): the columns of this GPU
    const float* residual,  // (M, N) or null
    T* out,                 // (M, N)
    int* abort,             // 1: no GPU waits any more
    long long* own,         // mailbox of this GPU
    long long* to_1,        // mailboxes of the others; null after the last one
    long long* to_2,
    long long* to_3,
    long long* to_4,
    long long* to_5,
    long long* to_6,
    long long* to_7,
    int M,         // rows
    int S,         // words of a row of `share`
    int N,         // words of a row of `out`
    int first,     // first word of this GPU in a row of `out`
    int capacity,  // words of half a mailbox, at least M N
    int parts) {   // SEND, RECEIVE or both; both, unless the GPUs are emulated one after another
    let_next_start();
    wait_for_previous();
    long long* const others[OTHERS] = {to_1, to_2, to_3, to_4, to_5, to_6, to_7};
    const unsigned round = (unsigned)__ldcg(own + ROUND) + 1u;
    const long long half = HEADER + (long long)(round & 1u) * capacity;
    const int thread = blockIdx.x * GATHER_THREADS + threadIdx.x, threads = gridDim.x * GATHER_THREADS;
    const unsigned* from = reinterpret_cast<const unsigned*>(share);
    unsigned words[GATHER_WIDTH];
    if (parts & SEND) {
        for (int i = thread * GATHER_WIDTH; i < M * S; i += threads * GATHER_WIDTH) {
            const int m = i / S, at = m * N + first + (i - m * S);
#pragma unroll
            for (int w = 0; w < GATHER_WIDTH; ++w) words[w] = __ldcg(from + i + w);
#pragma unroll
            for (int g = 0; g < OTHERS; ++g)
                if (others[g] != nullptr) send<GATHER_WIDTH>(others[g] + half + at, words, round);
        }
    }
    if (!(parts & RECEIVE)) return;
    const long long begun = clock64();
    bool ends = false;
    for (int i = thread * GATHER_WIDTH; i < M * N && !ends; i += threads * GATHER_WIDTH) {
        const int m = i / N, n = i - m * N;
        if (n >= first && n < first + S) {
#pragma unroll
            for (int w = 0; w < GATHER_WIDTH; ++w) words[w] = __ldcg(from + m * S + (n - first) + w);
        } else {
            for (int polls = 1; !receive<GATHER_WIDTH>(own + half + i, words, round) && !ends; ++polls)
                ends = polls % POLLS == 0 && gives_up(abort, begun);
        }
#pragma unroll
        for (int w = 0; w < GATHER_WIDTH; ++w) {
            if (residual != nullptr) words[w] = __float_as_uint(__ldcg(residual + i + w) + __uint_as_float(words[w]));
            reinterpret_cast<unsigned*>(out)[i + w] = words[w];
        }
    }
    end_round(own, round);
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 2) gather_rows(
    const T* share,         // arguments: see `gather`
    const float* residual,
    T* out,
    int* abort,
    long long* own,
    long long* to_1,
    long long* to_2,
    long long* to_3,
    long long* to_4,
    long long* to_5,
    long long* to_6,
    long long* to_7,
    int M,
    int S,
    int N,
    int first,
    int capacity,  // words of half an area of words with their round, before this kernel's area
    int most,      // words of half this kernel's area, at least M N
    int me,        // index of this GPU
    int rows,      // rows for each flag
    int parts) {
    let_next_start();
    wait_for_previous();
    long long* const others[OTHERS] = {to_1, to_2, to_3, to_4, to_5, to_6, to_7};
    const unsigned round = (unsigned)__ldcg(own + ROUND) + 1u;
    const long long area = HEADER + 2ll * capacity, half = (long long)(round & 1u) * most;  // in 8 bytes; in words
    const unsigned* from = reinterpret_cast<const unsigned*>(share);
    int gpus = 1;
#pragma unroll
    for (int g = 0; g < OTHERS; ++g) gpus += others[g] != nullptr;
    if (parts & SEND) {
        for (int piece = blockIdx.x; piece * rows < M; piece += gridDim.x) {
            const int row = piece * rows, count = min(rows, M - row) * S;
            for (int i = threadIdx.x * 4; i < count; i += GATHER_THREADS * 4) {
                const int4 words = __ldcg(reinterpret_cast<const int4*>(from + row * S + i));
                const long long at = half + (row + i / S) * N + first + i % S;
#pragma unroll
                for (int g = 0; g < OTHERS; ++g)
                    if (others[g] != nullptr)
                        *reinterpret_cast<int4*>(reinterpret_cast<int*>(others[g] + area) + at) = words;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence_system();
#pragma unroll
                for (int g = 0; g < OTHERS; ++g)
                    if (others[g] != nullptr)
                        reinterpret_cast<volatile unsigned*>(others[g] + FLAGS)[me * MOST_PIECES + piece] = round;
            }
        }
    }
    if (!(parts & RECEIVE)) return;
    const long long begun = clock64();
    const volatile unsigned* const flags = reinterpret_cast<const volatile unsigned*>(own + FLAGS);
    for (int piece = blockIdx.x; piece * rows < M; piece += gridDim.x) {
        if (threadIdx.x < gpus && threadIdx.x != me) {
            bool ends = false;
            for (int polls = 1; flags[threadIdx.x * MOST_PIECES + piece] != round && !ends; ++polls)
                ends = polls % POLLS == 0 && gives_up(abort, begun);
            __threadfence_system();
        }
        __syncthreads();
        const int row = piece * rows, count = min(rows, M - row) * N;
        for (int i = threadIdx.x * 4; i < count; i += GATHER_THREADS * 4) {
            const int m = row + i / N, n = i % N, at = row * N + i;
            const bool mine = n >= first && n < first + S;
            const int* words = mine ? reinterpret_cast<const int*>(from) + m * S + (n - first)
                                    : reinterpret_cast<const int*>(own + area) + half + at;
            int4 v = __ldcg(reinterpret_cast<const int4*>(words));
            if (residual != nullptr) {
                const float4 r = __ldcg(reinterpret_cast<const float4*>(residual + at));
                v.x = __float_as_int(r.x + __int_as_float(v.x));
                v.y = __float_as_int(r.y + __int_as_float(v.y));
                v.z = __float_as_int(r.z + __int_as_float(v.z));
                v.w = __float_as_int(r.w + __int_as_float(v.w));
            }
            *reinterpret_cast<int4*>(reinterpret_cast<int*>(out) + at) = v;
        }
    }
    end_round(own, round);
}
