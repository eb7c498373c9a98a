// Gathers rows whose columns several GPUs have computed: every GPU gets whole rows.
//
//   gather: stores words with the number of their round into the memory of the other GPUs; no flag, no barrier
//
//   out[m, n] = share_g[m, n - first_g] (+ residual[m, n])      g: the GPU that has column n
//
// A round is one launch of this kernel on all GPUs. Each GPU has a mailbox, whose entries of 8 bytes are a word (4
// bytes) and the number of its round. A GPU stores the words of its columns into the mailboxes of the other GPUs. It
// then reads its own mailbox until every entry has the number of this round. An entry is stored and loaded at once, so
// a word that has arrived is complete, and needs no fence. A mailbox has two halves, which rounds use in turn.
//
// Rounds r and r + 2 use the same half. Storing in round r + 2 is safe: a GPU stores then only after its own round r +
// 1 has ended. That round ended only after all other GPUs had stored words of round r + 1. Each of them did so after
// its own round r had ended, so it had read all its words of round r.
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
// grid (blocks), block (GATHER_THREADS). T: any type; S, N and first count words.
#include "lib/overlap.cuh"
#include "lib/storage.cuh"

#ifndef GATHER_WIDTH  // words of a thread at a time, 1 or 2; divides S, N and first
#define GATHER_WIDTH 2
#endif
#define GATHER_THREADS 512
#define OTHERS 7   // most GPUs besides this one
#define ROUND 0    // place in a mailbox of the number of the previous round
#define ENDED 1    // place of the number of blocks that have ended in this round
#define HEADER 16  // entries before the two halves
#define SEND 1     // `parts`: which parts of the kernel run
#define RECEIVE 2
#define PATIENCE 20000000000ll  // clock cycles, about 10 s
#define POLLS 4096              // attempts between two looks at *abort

// Stores words with the number of their round. The 8 bytes of an entry are stored and loaded at once.
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
    int capacity,  // entries of half a mailbox, at least M N
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
    __syncthreads();
    if (threadIdx.x == 0) {
        // The last block to end stores the number of this round: all blocks have read the previous number by then.
        if (atomicAdd(reinterpret_cast<unsigned long long*>(own + ENDED), 1ull) == gridDim.x - 1) {
            own[ENDED] = 0;
            own[ROUND] = round;
        }
    }
}
