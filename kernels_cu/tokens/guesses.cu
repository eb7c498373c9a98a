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
//   history (B, H): the tokens of each slot, that at its position the last one
//   guess (B, K): -1 where there is none
//   row, row_token, row_position, turn (M = together N), drawn and logprobs of these rows; a position of -1: no row
//   left (B): tokens that may still be drawn
//
//   begin_guesses: a block copies the prompt of a sequence that begins to its history
//   take_guesses: a block takes the tokens of a slot, and guesses the next ones: what follows the latest place where
//       the last three tokens occurred before, or where two of them or one did, if there is none. Beyond the last token
//       a guess goes on with guesses, so that a text that repeats itself is continued
#include "lib/overlap.cuh"
#include "tokens/guesses.cuh"

constexpr int MATCH = 3;                // tokens
constexpr int PLACE = 29;               // bits of a place in a history, below the length of a match
constexpr int TAKEN = 1, GUESSED = 2, RIGHT = 4;

// The length of the match before `at`, and its place: the largest is the latest one of the longest. 0: none.
__device__ __forceinline__ unsigned match(const int* tokens, int at, int last) {
    int length = 0;
    while (length < MATCH && length <= at && tokens[at - length] == tokens[last - length]) ++length;
    return length ? (unsigned)length << PLACE | (unsigned)at : 0;
}

// Takes the drawn tokens of a slot's rows, with a lane for each row. Returns how many, in all lanes.
struct Slot {
    int *history, *guess, *left, *position, *step, *token;
    float* logprob;
    unsigned char* seen;
    int* counts;
    int H, K, V;

    __device__ __forceinline__ int take(
        const int* drawn, const float* likely, const int* row_position, int* report, int together, int M) const {
        const int lane = threadIdx.x, before = *position;
        const bool own = lane < together && row_position[min(lane, together - 1)] >= 0;
        const int id = own ? drawn[lane] : -1, known = lane < K ? guess[lane] : -1;
        const bool right = own && known >= 0 && id == known;
        const bool next = __shfl_down_sync(0xffffffffu, own, 1) && lane + 1 < together;
        const int goes_on = __ffs(~__ballot_sync(0xffffffffu, right && next));  // rows up to the first difference
        const int count = __shfl_sync(0xffffffffu, own, 0) ? goes_on : 0, at = before + 1 + lane;
        if (lane < together) {
            report[lane] = id;
            report[M + lane] = own ? __float_as_int(likely[lane]) : 0;
            report[2 * M + lane] = (lane < count) * TAKEN + (own && known >= 0) * GUESSED + right * RIGHT;
        }
        if (lane < count) {
            if (at < H) history[at] = id;
            if (id >= 0 && id < V) {
                seen[id] |= 1;
                if (counts) atomicAdd(counts + id, 1);
            }
        }
        if (count && lane == count - 1) {
            *position = before + count;
            *step += count;
            *left -= count;
            *token = id;
            *logprob = likely[lane];
        }
        __syncwarp();
        return count;
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
    __shared__ unsigned best;
    __shared__ int taken;
    const int first = blockIdx.x * together, M = gridDim.x * together, b = row[first], thread = threadIdx.x;
    let_next_start();
    wait_for_previous();
    const int half = turn[first] % 2;
    if (b < 0 || b >= B) {
        if (thread == 0) turn[first] += 1;
        return;
    }
    const Slot slot = {
        history + (long long)b * H, guess + (long long)b * K, left + b, position + b, step + b, token + b, logprob + b,
        seen + (long long)b * V, counts ? counts + (long long)b * V : nullptr, H, K, V};
    if (thread == 0) best = 0;
    if (thread < 32) {
        int* const to = report + half * 3 * M + first;
        const int count = slot.take(drawn + first, likely + first, row_position + first, to, together, M);
        if (thread == 0) taken = count, turn[first] += 1;
    }
    __syncthreads();
    const int last = min(*slot.position, H - 1), more = *slot.left;
    if (taken) {
        unsigned found = 0;
        for (int at = thread; at < last; at += blockDim.x) found = max(found, match(slot.history, at, last));
        for (int distance = 16; distance > 0; distance /= 2) {
            found = max(found, __shfl_xor_sync(0xffffffffu, found, distance));
        }
        if (thread % 32 == 0 && found) atomicMax(&best, found);
    }
    __syncthreads();
    const int from = (int)(best & ((1u << PLACE) - 1)), period = last - from;
    const auto guessed = [&](int i) { return best ? slot.history[from + 1 + i % period] : -1; };
    if (thread < K && taken) slot.guess[thread] = guessed(thread);
    if (thread >= together) return;
    const int id = thread ? guessed(thread - 1) : *slot.token;
    row_token[first + thread] = id;
    row_position[first + thread] = taken ? position_of(thread, id, *slot.position, more) : -1;
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
