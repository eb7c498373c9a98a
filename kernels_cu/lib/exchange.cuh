// Peer buffers through which GPUs exchange words (4 bytes). peers/all_gather.cu describes the protocol, and why it is
// safe.
#pragma once

#define MAX_OTHERS 7      // maximum number of other GPUs
#define LAST_ROUND 0      // entry of a peer buffer that holds the number of the previous round
#define STORED 1          // entry that holds the number of blocks that have called store_round in this round
#define FLAGS 16          // first entry of the flags: two halves of (MAX_OTHERS, MAX_PIECES) flags, 4 bytes each
#define MAX_PIECES 1024  // flags per half for each other GPU
#define HEADER (FLAGS + MAX_OTHERS * MAX_PIECES)  // entries before the words with the number of their round
#define TO_PEERS 1                                  // bits of `parts`: the parts of a kernel that a launch runs
#define FROM_PEERS 2
#ifndef OTHERS  // number of other GPUs
#define OTHERS MAX_OTHERS
#endif
#define PATIENCE 20000000000ll  // clock cycles, about 10 s
#define POLLS 4096              // attempts between two reads of *abort

// Returns the number of this round. All threads of a kernel call it before they call store_round.
__device__ __forceinline__ unsigned next_round(const long long* own) { return (unsigned)__ldcg(own + LAST_ROUND) + 1u; }

// Returns the first entry of a round in the area of `all_gather`, whose halves have `capacity` entries.
__device__ __forceinline__ long long first_entry(unsigned round, int capacity) {
    return HEADER + (long long)(round & 1u) * capacity;
}

// Stores the number of the round for the next kernel. The last block that calls this function stores it: all blocks
// have then read the previous number. A block calls it before it waits for words: the atomic operation takes place
// during this wait, and does not lengthen the kernel. Each thread passes the number to the barrier, and thus reaches
// the barrier only after its load of the previous number has ended.
__device__ __forceinline__ void store_round(long long* own, unsigned round) {
    __syncthreads_or((int)round);
    if (threadIdx.x == 0 && atomicAdd(reinterpret_cast<unsigned long long*>(own + STORED), 1ull) == gridDim.x - 1) {
        own[STORED] = 0;
        own[LAST_ROUND] = round;
    }
}

// Stores words with the number of their round. The 8 bytes of an entry (word and number) are stored, and loaded, in one
// access.
template <int COUNT>
__device__ __forceinline__ void store_words(long long* to, const unsigned* words, unsigned round) {
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

// The peer buffers through which a kernel sends its outputs, this GPU's columns of a matrix (M, whole).
struct Peers {
    const long long* own;
    long long* others[MAX_OTHERS];
    int first, whole, capacity;  // first column of this GPU; columns of all GPUs; entries per half of its area

    // Sends the outputs n, n + 1, ... of this GPU in row m. An all-gather that only receives must follow as the next
    // all-gather.
    template <int COUNT>
    __device__ __forceinline__ void store_outputs(int m, int n, const float (&v)[COUNT], unsigned round) const {
        const long long at = first_entry(round, capacity) + (long long)m * whole + first + n;
        unsigned words[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) words[e] = (unsigned)__float_as_int(v[e]);
#pragma unroll
        for (int g = 0; g < OTHERS; ++g) store_words<COUNT>(others[g] + at, words, round);
    }
};

// Loads words that another GPU may be storing. Returns whether all of these words have arrived.
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

// Returns whether a thread that has polled `polls` times since cycle `begun` must end without a result.
__device__ __forceinline__ bool gives_up(int polls, volatile int* abort, long long begun) {
    if (polls % POLLS || (*abort == 0 && clock64() - begun < PATIENCE)) return false;
    *abort = 1;
    return true;
}
