// Draft tokens of a sequence's next tokens from its own earlier tokens (prompt lookup), and the count of correct draft
// tokens.
//
// A slot is the place of a sequence in the batch. A decoding step computes `together` neighbouring rows per slot, at
// successive positions: the row of the slot's last token, and rows of draft tokens of the tokens after it. The token of
// each row is sampled as if the draft tokens before it were correct (tokens/sample.cu). Sampled tokens are taken up to
// and including the first token that differs from its draft token. These tokens are the same as with one row per step,
// in fewer steps.
//
//   rows of a slot   last token   draft 0   draft 1   draft 2
//   sampled          a            b         c         d
//   a = draft 0, b = draft 1, c != draft 2: a, b and c are taken
//
// history (B, H): the tokens of each slot; index position[b] holds the last token. draft (B, K): -1 for no draft token.
// left (B): tokens that may still be sampled. known (B): number of tokens in the history of a slot whose text is known,
// else 0. row, row_token, row_position, turn, sampled, likely (M): one entry per row of the step. A row whose position
// is -1 is not computed.
//
//   begin_drafts: one block per new sequence copies its prompt, and its text if it is known, to its history
//   take_drafts: one block per slot takes sampled tokens, and drafts the next tokens of a known text, or else the
//       tokens that followed the latest earlier occurrence of the slot's last three tokens
//   taken_rows: one thread per slot finds, before take_drafts, the row of the last token that take_drafts will take
//       (it also keeps the positions of the rows)
//
// If the last three tokens do not occur earlier, the last two tokens are searched, then the last token. If the copied
// tokens reach the end of the history, the draft tokens repeat from the first draft token, which continues a repeating
// text. The history is loaded while the sampled tokens are compared.
//
// Measured: docs/performance.md#draft-tokens
#include "lib/overlap.cuh"
#include "lib/drafts.cuh"

constexpr int MATCH = 3;   // maximum number of tokens that are compared
constexpr int PLACE = 29;  // bits of an index in a history; the bits above hold the length of a match
constexpr int HELD = 8;    // tokens of a history that a thread loads before the sampled tokens are known
constexpr int ROWS = 64;   // maximum number of rows per slot
constexpr int TAKEN = 1, DRAFTED = 2, RIGHT = 4;

// The new tokens of a slot, and the best match for the sequence's last tokens.
struct Taken {
    int ids[ROWS];                 // the new tokens
    int before;                    // index in the history of the token before ids[0]
    unsigned best;                 // the longest match: its length and its index in the history
    bool some;                     // whether the first row is computed
    unsigned goes_on[ROWS / 32];   // a bit per row: its draft token was right, and the next row is computed
};

// The tokens of a sequence, including the new tokens.
struct Tokens {
    const int* history;
    const Taken& taken;

    __device__ __forceinline__ int operator[](int at) const {
        return at <= taken.before ? history[at] : taken.ids[at - taken.before - 1];
    }

    // Compares the tokens up to `at` with the tokens up to `last`, backwards. Returns (number of equal tokens) << PLACE
    // | at; 0 for no match. The maximum of these values is the latest of the longest matches.
    __device__ __forceinline__ unsigned match(int at, int last) const {
        int length = 0;
        while (length < MATCH && length <= at && (*this)[at - length] == (*this)[last - length]) ++length;
        return length ? (unsigned)length << PLACE | (unsigned)at : 0;
    }
};

// grid (N), block (any multiple of 32 from ROWS on)
// Launched by operation (variant): take_drafts (drafts)
extern "C" __global__ void take_drafts(
    const int* sampled,     // (M)
    const float* likely,    // (M): log-probabilities of the tokens in `sampled`
    const int* row,         // (M): slot of each row; outside 0 ... B - 1: no slot
    int* row_token,         // (M): tokens of the next step
    int* row_position,      // (M): positions of this step, then of the next one
    int* turn,              // (M): incremented for the first row of each slot
    int* history,           // (B, H)
    int* draft,             // (B, K)
    int* left,              // (B)
    const int* known,       // (B)
    int* position,          // (B): position of the last token
    int* step,              // (B): tokens sampled so far
    int* token,             // (B): the last token
    float* logprob,         // (B): log-probability of the last token
    unsigned char* occurred,  // (B, V): the lowest bit is set for tokens taken
    int* counts,            // (B, V), or null: incremented for tokens taken
    int* report,            // (2, 3, M), for even and odd turns: sampled, bits of likely, flags
    int together, int B, int H, int K, int V) {
    __shared__ Taken taken;
    const int first = blockIdx.x * together, M = gridDim.x * together, b = row[first], thread = threadIdx.x;
    const int m = first + min(thread, together - 1);
    let_next_start();
    wait_for_previous();
    const int turns = turn[first];
    if (b < 0 || b >= B) {
        __syncthreads();  // all threads have read `turn`
        if (thread == 0) turn[first] = turns + 1;
        return;
    }
    int* const own = history + (long long)b * H;
    int held[HELD];  // tokens at indices thread, thread + blockDim.x ... of the history
#pragma unroll
    for (int i = 0; i < HELD; ++i) held[i] = own[min(thread + i * (int)blockDim.x, H - 1)];
    const int before = position[b], now_left = left[b], at = row_position[m], one = sampled[m], text = known[b];
    const int next_at = row_position[min(m + 1, first + together - 1)];
    const int its_draft = draft[(long long)b * K + min(thread, K - 1)];
    const float probability = likely[m];
    const bool there = thread < together && at >= 0, has_guess = there && thread < K && its_draft >= 0;
    const int id = there ? one : -1;
    const bool right = has_guess && id == its_draft;
    if (thread < ROWS) {
        const unsigned goes_on = __ballot_sync(0xffffffffu, right && thread + 1 < together && next_at >= 0);
        if (thread % 32 == 0) taken.goes_on[thread / 32] = goes_on;
        taken.ids[thread] = id;
        if (thread == 0) taken.some = there, taken.before = before, taken.best = 0;
    }
    __syncthreads();  // all threads have read the state of the slot
    const Tokens tokens{own, taken};
    // rows up to the first wrong draft token; 0: the first 32 draft tokens are right
    const int in_first = __ffs(~taken.goes_on[0]);
    const int count = !taken.some ? 0 : in_first ? in_first : 32 + __ffs(~taken.goes_on[1]), last = before + count;
    if (thread == 0) turn[first] = turns + 1;
    if (thread < together) {
        int* const to = report + turns % 2 * 3 * M + m;
        to[0] = id;
        to[M] = there ? __float_as_int(probability) : 0;
        to[2 * M] = (thread < count) * TAKEN + has_guess * DRAFTED + right * RIGHT;
    }
    if (thread < count && id >= 0 && id < V) {
        bool first_of_id = true;  // one thread writes the byte of a token that occurs several times
        for (int i = 0; i < thread; ++i) first_of_id = first_of_id && taken.ids[i] != id;
        if (first_of_id) occurred[(long long)b * V + id] |= 1;
        if (counts) atomicAdd(counts + (long long)b * V + id, 1);
    }
    if (thread < count && before + 1 + thread < H) own[before + 1 + thread] = taken.ids[thread];
    if (count && thread == count - 1) {
        position[b] = last;
        step[b] += count;
        left[b] = now_left - count;
        token[b] = taken.ids[thread];
        logprob[b] = probability;
    }
    if (count && !text) {
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
    const auto drafted = [&](int i) {
        if (text) return last + 1 + i < text ? own[last + 1 + i] : -1;
        return best ? tokens[from + 1 + i % period] : -1;
    };
    if (thread < K && count) draft[(long long)b * K + thread] = drafted(thread);
    if (thread >= together) return;
    const int next = !count ? -1 : thread ? drafted(thread - 1) : taken.ids[count - 1];
    row_token[m] = next;
    row_position[m] = count ? position_of(thread, next, last, more) : -1;
}

// grid (ceil(M / together / threads)), block (any)
// Launched by operation (variant): taken_rows (rows)
extern "C" __global__ void taken_rows(
    const int* sampled,       // (M)
    const int* row,           // (M)
    const int* row_position,  // (M)
    const int* draft,         // (B, K)
    int* followed,            // (2, M): positions of the rows, -1 for no slot; for each slot, the row of its last token
    int together, int M, int B, int K) {
    const int slot = blockIdx.x * blockDim.x + threadIdx.x, first = slot * together;
    let_next_start();
    wait_for_previous();
    if (first >= M) return;
    const int b = row[first];
    int last = first;
    for (int m = first; m < first + together; ++m) {
        const int at = b < 0 || b >= B ? -1 : row_position[m], before = m - 1;
        followed[m] = at;
        if (at >= 0 && last == before && sampled[before] == draft[(long long)b * K + before - first]) last = m;
    }
    followed[M + slot] = last;
}

// grid (N new sequences), block (any)
// Launched by operation (variant): take_drafts (drafts)
extern "C" __global__ void begin_drafts(
    const int* numbers,  // five arrays (N): slots, offsets and lengths of texts, `left`, lengths of their prompts; then
                         // the tokens of the texts: of a prompt, and of its continuation if that is known
    int* history,        // (B, H)
    int* draft,          // (B, K)
    int* left,           // (B)
    int* known,          // (B)
    int B, int H, int K) {
    const int N = gridDim.x, n = blockIdx.x, slot = numbers[n];
    if (slot < 0 || slot >= B) return;
    const int* const ids = numbers + 5 * N + numbers[N + n];
    const int count = min(numbers[2 * N + n], H), prompt = numbers[4 * N + n];
    for (int i = threadIdx.x; i < count; i += blockDim.x) history[(long long)slot * H + i] = ids[i];
    for (int i = threadIdx.x; i < K; i += blockDim.x) {
        draft[(long long)slot * K + i] = prompt + i < count ? ids[prompt + i] : -1;
    }
    if (threadIdx.x == 0) left[slot] = numbers[3 * N + n], known[slot] = prompt < count ? count : 0;
}
