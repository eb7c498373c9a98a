// Guesses of a sequence's next tokens out of its own ones, and how many of them were right.
//
// A step of decoding computes `together` neighbouring rows of a slot: its last token, and guesses of the tokens after
// it, at successive positions. The token of each row is drawn as if the guesses before it were right
// (tokens/sample.cu). Those up to the first difference are taken. They are the tokens that a row a step would draw, in
// fewer steps.
//
//   rows of a slot   last token   guess 0   guess 1   guess 2
//   drawn                     a         b         c         d      a = guess 0, b = guess 1, c != guess 2: a, b, c
//
// history (B, H): the tokens of each slot, that at its position the last one. guess (B, K): -1 where there is none.
// left (B): tokens that may still be drawn. row, row_token, row_position, turn, drawn, likely: of the M rows of N
// slots. A row whose position is -1 is not computed.
//
//   begin_guesses: a block copies the prompt of a sequence that begins to its history
//   take_guesses: a block takes the tokens of a slot, and guesses what follows the latest place where its last three
//       tokens were before
//
// If there is no such place, the last two tokens are searched, then the last one. Beyond the last token a guess goes on
// with guesses, so that a text that repeats itself is continued. The history is loaded while the drawn tokens are
// compared.
//
// NVIDIA H200, us a launch of take_guesses in a graph: 3.0 with a history of 500 or 2,000 tokens, 4.7 with 8,000; with
// 8 rows of a slot 4.3, 4.4 and 6.4
#include "lib/overlap.cuh"
#include "tokens/guesses.cuh"

constexpr int MATCH = 3;   // tokens
constexpr int PLACE = 29;  // bits of a place in a history, below the length of a match
constexpr int HELD = 8;    // tokens of a history that a thread loads before it knows the last ones
constexpr int TAKEN = 1, GUESSED = 2, RIGHT = 4;

// What the drawn tokens make of a slot.
struct Taken {
    int ids[32];        // the tokens that are taken
    int count, before;  // how many; the place of the last token before them
    unsigned best;      // the longest match, and its place
};

// The tokens of a sequence, the new ones among them.
struct Tokens {
    const int* history;
    const Taken& taken;

    __device__ __forceinline__ int operator[](int at) const {
        return at <= taken.before ? history[at] : taken.ids[at - taken.before - 1];
    }

    // The length of the match that ends at `at`, and that place: the largest is the latest one of the longest. 0: none.
    __device__ __forceinline__ unsigned match(int at, int last) const {
        int length = 0;
        while (length < MATCH && length <= at && (*this)[at - length] == (*this)[last - length]) ++length;
        return length ? (unsigned)length << PLACE | (unsigned)at : 0;
    }
};

// grid (N), block (any multiple of 32 from 32 on)
extern "C" __global__ void take_guesses(
    const int* drawn,       // (M)
    const float* likely,    // (M): their log-probabilities
    const int* row,         // (M): slots; outside of 0 ... B - 1, there is none
    int* row_token,         // (M): of the next step
    int* row_position,      // (M): of this step, then of the next one
    int* turn,              // (M): of the first row of each slot, incremented
    int* history,           // (B, H)
    int* guess,             // (B, K)
    int* left,              // (B)
    int* position,          // (B): of the last token
    int* step,              // (B): tokens drawn so far
    int* token,             // (B): the last one
    float* logprob,         // (B): of the last one
    unsigned char* seen,    // (B, V): the lowest bit is set for tokens that are taken
    int* counts,            // (B, V), or null: incremented for these
    int* report,            // (2, 3, M): drawn, bits of likely, and flags of each row, of even and odd turns
    int together, int B, int H, int K, int V) {
    __shared__ Taken taken;
    const int first = blockIdx.x * together, M = gridDim.x * together, b = row[first], thread = threadIdx.x;
    const int m = first + min(thread, together - 1);
    let_next_start();
    wait_for_previous();
    const int turns = turn[first];
    if (b < 0 || b >= B) {
        if (thread == 0) turn[first] = turns + 1;
        return;
    }
    int* const own = history + (long long)b * H;
    int held[HELD];  // of places `thread`, `thread` + blockDim.x ...
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i] = own[min(thread + i * (int)blockDim.x, H - 1)];
    const int before = position[b], now_left = left[b], at = row_position[m], one = drawn[m];
    const int its_guess = guess[(long long)b * K + min(thread, K - 1)];
    const float probability = likely[m];
    if (thread < 32) {
        const bool there = thread < together && at >= 0;
        const int id = there ? one : -1, known = thread < K ? its_guess : -1;
        const bool right = there && known >= 0 && id == known;
        const bool next = __shfl_down_sync(0xffffffffu, there, 1) && thread + 1 < together;
        const int goes_on = __ffs(~__ballot_sync(0xffffffffu, right && next));  // rows up to the first difference
        const int count = __shfl_sync(0xffffffffu, there, 0) ? goes_on : 0;
        taken.ids[thread] = id;
        if (thread == 0) {
            taken.count = count, taken.before = before, taken.best = 0;
            turn[first] = turns + 1;
        }
        if (thread < together) {
            int* const to = report + turns % 2 * 3 * M + m;
            to[0] = id;
            to[M] = there ? __float_as_int(probability) : 0;
            to[2 * M] = (thread < count) * TAKEN + (there && known >= 0) * GUESSED + right * RIGHT;
        }
        if (thread < count) {
            if (before + 1 + thread < H) own[before + 1 + thread] = id;
            if (id >= 0 && id < V) {
                seen[(long long)b * V + id] |= 1;
                if (counts) atomicAdd(counts + (long long)b * V + id, 1);
            }
        }
        if (count && thread == count - 1) {
            position[b] = before + count;
            step[b] += count;
            left[b] = now_left - count;
            token[b] = id;
            logprob[b] = probability;
        }
    }
    __syncthreads();
    const Tokens tokens{own, taken};
    const int count = taken.count, last = before + count;
    if (count) {
        const int end = taken.ids[count - 1];
        unsigned found = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = thread + i * (int)blockDim.x;
            if (at <= before && at < last && held[i] == end) found = max(found, tokens.match(at, last));
        }
        for (int at = thread + HELD * (int)blockDim.x; at <= before; at += blockDim.x) {
            if (own[at] == end) found = max(found, tokens.match(at, last));
        }
        if (thread < count - 1) found = max(found, tokens.match(before + 1 + thread, last));
        for (int distance = 16; distance > 0; distance /= 2) {
            found = max(found, __shfl_xor_sync(0xffffffffu, found, distance));
        }
        if (thread % 32 == 0 && found) atomicMax(&taken.best, found);
    }
    __syncthreads();
    const unsigned best = taken.best;
    const int from = (int)(best & ((1u << PLACE) - 1)), period = last - from, more = now_left - count;
    const auto guessed = [&](int i) { return best ? tokens[from + 1 + i % period] : -1; };
    if (thread < K && count) guess[(long long)b * K + thread] = guessed(thread);
    if (thread >= together) return;
    const int id = thread ? guessed(thread - 1) : count ? taken.ids[count - 1] : -1;
    row_token[m] = id;
    row_position[m] = count ? position_of(thread, id, last, more) : -1;
}

// grid (N), block (any): the sequences that begin
extern "C" __global__ void begin_guesses(
    const int* numbers,  // (4 N, then the tokens): slot, first token among them, how many, and how many may be drawn
    int* history,        // (B, H)
    int* guess,          // (B, K)
    int* left,           // (B)
    int B, int H, int K) {
    const int N = gridDim.x, n = blockIdx.x, slot = numbers[n];
    if (slot < 0 || slot >= B) return;
    const int* const ids = numbers + 4 * N + numbers[N + n];
    const int count = min(numbers[2 * N + n], H);
    for (int i = threadIdx.x; i < count; i += blockDim.x) history[(long long)slot * H + i] = ids[i];
    for (int i = threadIdx.x; i < K; i += blockDim.x) guess[(long long)slot * K + i] = -1;
    if (threadIdx.x == 0) left[slot] = numbers[3 * N + n];
}
