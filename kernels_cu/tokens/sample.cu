// Chooses the next token of each row from its logits, on the device.
//
//   logits (M, V); per sequence: temperature, top_p, min_p, repetition_penalty, top_k, seed, sample (B);
//   occurred (B, V): 1 for tokens that have occurred; step (B): tokens sampled so far; position, token, logprob (B);
//   row (M) holds the sequence of each row of logits; without `row`, row m belongs to sequence m
//   with SAMPLE_CHANGES: changes (B, 258): 128 entries of two floats, then frequency_penalty and presence_penalty.
//   Entry 0 holds two numbers: 1 if any logit of the sequence changes, and min_new_tokens. Every other entry holds two
//   biases, one until min_new_tokens are sampled and one afterwards. occurred[b, t] also holds twice the index of token
//   t's entry; index 0: no bias. With SAMPLE_CHANGES 2, counts (B, V): how often each token was sampled
//   with SAMPLE_MASKS: mask_index (M): 1 + the index of the row's mask, or 0 for no mask; masks (R, ceil(V / 32)): bit
//   t % 32 of word t / 32 is 1 if token t is allowed
//
//   l     = -inf for a token that the row's mask excludes. For any other token, l is first logit + bias, where a bias
//           of -inf excludes an end token that is not yet allowed. For a seen token, l is then multiplied by 1 /
//           repetition_penalty if l is positive, else by repetition_penalty. For a sampled token, frequency_penalty
//           times its count and presence_penalty are then subtracted
//   mass  = floor(2^40 exp((l - max l) / temperature)), an integer
//   top-k   keeps the k largest l. Of these tokens, top-p keeps the fewest tokens, largest l first, whose masses
//           add up to at least the fraction p of the mass of these tokens. Ties with the last token kept are kept as
//           well. min-p keeps tokens with a mass of at least min_p 2^40. top_k 0, top_p 1 and min_p 0 keep all tokens.
//   draw    takes the first token, in order of ids, at which the running sum of masses kept exceeds r = floor(u (sum of
//           masses kept)). u in [0, 1) has 64 bits: Philox4x32-10 of the counter (step, sample), with key `seed`.
//   temperature 0: the token with the largest l; of several such tokens, the lowest id
//
// logprob is the token's log-probability under the unmodified logits. A row with NaN, or with only -inf, gives token
// -1. With SAMPLE_DRAFTS, row i (from 0) of a sequence is sampled with the counter step + i, as if the draft tokens in
// its rows 1 to i had been sampled. tokens/drafts.cu then decides which sampled tokens are taken, and changes the
// state. With `forced`, a row reports the given token and its logprob instead; the temperature must be 0.
//
//   sample_token: one to eight blocks per row; after exp all arithmetic is integer: the same bits in any batch. The
//       blocks of a row are a cluster, each with a contiguous part of the row. The first pass computes maximum and
//       log-sum-exp, which suffices for temperature 0. For top-k and top-p, candidates.cuh finds the smallest l kept.
//       The last pass adds the masses kept and draws. If top-k has a few candidates, no further pass is needed: each
//       block compares all of them
//   mark_occurred: sets `occurred` for tokens of prompts, for the repetition penalty
//
// Blocks read their parts of a row from global memory in every pass: a copy in shared memory takes longer. The loop of
// first_pass counts loads: a loop over columns takes longer with masks.
//
// Measured: docs/experiments.md#sample_token
#include "tokens/candidates.cuh"
#include "lib/overlap.cuh"

#if SAMPLE_CLUSTER == 1  // a single block is launched without a cluster
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

// Returns 64 random bits. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
__device__ u64 philox(unsigned step, unsigned sample, u64 seed) {
    unsigned c[4] = {step, sample, 0, 0}, key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = (u64)0xD2511F53u * c[0], b = (u64)0xCD9E8D57u * c[2];
        c[0] = (unsigned)(b >> 32) ^ c[1] ^ key0;
        c[1] = (unsigned)b;
        c[2] = (unsigned)(a >> 32) ^ c[3] ^ key1;
        c[3] = (unsigned)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (u64)c[1] << 32 | c[0];
}

// Finds the best token of a row, and the maximum and the sum of exp of its logits. Sums are added as by one block of
// PASS threads, so the order of additions depends only on V: each warp computes the sums of one or more warps of such a
// block. Every block of the row receives all results. Returns the largest l that this thread has read, or -inf. top_k:
// whether s.second is needed.
__device__ float first_pass(const Row& row, Shared& s, bool top_k, Best& best, Online& all) {
    const int lane = threadIdx.x % 32, start = rank_in_row() * SHARE;
    const float* columns = row.x + start;
    float largest = -INFINITY;
#pragma unroll 1
    for (int thread = threadIdx.x; thread < SHARE; thread += THREADS) {
        const int column = start + thread, count = (row.V - column + PASS - 1) / PASS;
        Best own = {-INFINITY, 0x7fffffff};
        Online online = {-INFINITY, 0.0f};
        float next[FIRST];
        load_columns(columns + thread, count * PASS, PASS, -INFINITY, next);
        for (int done = 0; done < count; done += FIRST) {
            float raw[FIRST], l[FIRST];
            const int first = column + done * PASS, left = count - done - FIRST;
#pragma unroll
            for (int i = 0; i < FIRST; ++i) l[i] = raw[i] = next[i];
            if (left > 0) load_columns(columns + thread + (done + FIRST) * PASS, left * PASS, PASS, -INFINITY, next);
            if (row.marks) {
                unsigned char marks[FIRST];
                load_columns(row.marks + first, row.V - first, PASS, (unsigned char)0, marks);
#pragma unroll
                for (int i = 0; i < FIRST; ++i) l[i] = row.changed(raw[i], marks[i], first + i * PASS);
            }
            row.exclude(l, first, PASS);
            online.take(raw);
#pragma unroll
            for (int i = 0; i < FIRST; ++i) {
                if (l[i] > own.l) own = {l[i], first + i * PASS};
            }
        }
        largest = fmaxf(largest, own.l);
        const Best of_lane = own;
        own = own.of_warp();
        online = online.of_warp();
        const int warp = (start + thread) / 32;
        if (top_k) {
            const float second = lanes_max<32>(of_lane.id == own.id ? -INFINITY : of_lane.l);
            if (lane < RANKS) *in_block(&s.second[warp], lane) = second;
        }
        if (lane < RANKS) {
            *in_block(&s.l[warp], lane) = own.l;
            *in_block(&s.id[warp], lane) = own.id;
            *in_block(&s.online[warp], lane) = online;
        }
    }
    sync_row();
    best = Best{s.l[lane], s.id[lane]}.of_warp();
    all = s.online[lane].of_warp();
    return largest;
}

// Returns whether the row has no valid token: a NaN, or only -inf. If the maximum is +inf, the sum is NaN in any case,
// so the row is searched for NaN.
__device__ bool hopeless(const Row& row, Shared& s, float largest, const Online& online) {
    if (largest == -INFINITY) return true;
    if (online.sum == online.sum) return false;
    if (online.max < INFINITY) return true;
    bool bad = false;
    for (int i = row.first + threadIdx.x; i < row.end; i += THREADS) bad = bad || row.x[i] != row.x[i];
    if (bad) {
        for (int rank = 0; rank < RANKS; ++rank) *in_block(&s.bad, rank) = 1;
    }
    sync_row();
    return s.bad;
}

// Returns the k-th largest of the values s.l and s.second, which are l of two different tokens per warp. k is at most
// the number of these values.
__device__ float kth_of_warps(Shared& s, int k) {
    if (threadIdx.x < 32) {
        const float one = s.l[threadIdx.x], two = s.second[threadIdx.x];
        int above_one = 0, above_two = 0;
#pragma unroll 8
        for (int i = 0; i < PASS_WARPS; ++i) {
            const float first = s.l[i], second = s.second[i];
            above_one += (first > one) + (second > one);
            above_two += (first > two) + (second > two);
        }
        const float least = fminf(above_one < k ? one : INFINITY, above_two < k ? two : INFINITY);
        const float all = -lanes_max<32>(-least);
        if (threadIdx.x == 0) s.cut = all;
    }
    __syncthreads();
    return s.cut;
}

// filter(), draw() and draw_listed() are not inlined: with them inlined, the kernel would spill registers.

// Draws a token with l >= cut and a mass of at least `part` UNIT. Returns the token in the block whose part of the row
// contains it, -1 in other blocks.
__device__ __noinline__ int draw(const Row& row, Shared& s, float cut, float part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int length = (row.end - row.first + WARPS - 1) / WARPS;  // consecutive columns per warp
    const int first = row.first + warp * length;
    const u64 least = (u64)(part * UNIT);
    const auto kept = [&](float l) {
        if (!(l >= cut)) return (u64)0;
        const u64 mass = row.mass(l);
        return mass >= least ? mass : 0;
    };
    u64 sum = 0;
    visit(row, first + lane, min(first + length, row.end), 32, [&](const float(&l)[LATER]) {
#pragma unroll
        for (int i = 0; i < LATER; ++i) sum += kept(l[i]);
    });
    const Scan scan = scan_block(sum, s);
    u64 total = scan.total;
    const u64 lower = before_block(total, s), r = __umul64hi(s.random, total);
    if (r < lower || r - lower >= scan.total) return -1;
    const u64 before = lower + __shfl_sync(0xffffffffu, scan.before, 0);
    const u64 after = lower + __shfl_sync(0xffffffffu, scan.before + sum, 31);
    if (lane == 0 && before <= r && r < after) s.digit = first, s.rest = r - before;
    __syncthreads();
    const int begin = s.digit, end = min(begin + length, row.end);
    u64 rest = s.rest;
    for (int base = begin; base < end; base += THREADS) {
        const int id = base + threadIdx.x;
        u64 mass = 0;
        visit(row, id, min(id + 1, end), LATER, [&](const float(&l)[LATER]) { mass = kept(l[0]); });
        const Scan here = scan_block(mass, s);
        if (here.before <= rest && rest < here.before + mass) s.token = id;
        if (rest < here.total) break;
        rest -= here.total;
    }
    __syncthreads();
    return s.token;
}

// Sums over the candidates of a list: masses of candidates with a larger key, and of all candidates.
struct Sums { u64 larger, total; };

// Writes a key and a mass for each of `count` candidates; PARTS threads have the same arguments, those of a candidate,
// and together compute its sums.
__device__ __noinline__ Sums sums(Shared& s, int count, float key, u64 mass) {
    const int own = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    __syncthreads();
    if (own < count && part == 0) s.list[own] = key, s.masses[own] = mass;
    __syncthreads();
    Sums found = {0, 0};
    for (int i = part; i < count; i += PARTS) {
        found.total += s.masses[i];
        if (s.list[i] > key) found.larger += s.masses[i];
    }
#pragma unroll
    for (int distance = 1; distance < PARTS; distance *= 2) {
        found.total += __shfl_xor_sync(0xffffffffu, found.total, distance);
        found.larger += __shfl_xor_sync(0xffffffffu, found.larger, distance);
    }
    return found;
}

// Draws one of the `count` candidates in s.list, at most LISTED, as draw() does for all tokens. Returns NaN. A token is
// kept if fewer than k tokens have a larger l, and if the masses of these are less than the fraction p of all masses.
__device__ __noinline__ float draw_listed(const Row& row, Shared& s, int count, int k, float p, float part) {
    __syncthreads();
    if (RANKS > 1) release_to_cluster();  // this block has copied the candidates of the other blocks
    const int own = threadIdx.x / PARTS;
    const float l = own < count ? s.list[own] : -INFINITY;
    const int id = own < count ? s.ids[own] : -1;
    u64 mass = sums(s, count, l, 1).larger < k ? row.mass(l) : 0;
    const Sums by_l = sums(s, count, l, mass);
    if ((p < 1.0f && by_l.larger >= part_of(p, by_l.total)) || mass < (u64)(part * UNIT)) mass = 0;
    const Sums by_id = sums(s, count, -(float)id, mass);  // exact: ids are below 2^23
    const u64 r = __umul64hi(s.random, by_id.total);
    if (own < count && threadIdx.x % PARTS == 0 && by_id.larger <= r && r < by_id.larger + mass) s.token = id;
    __syncthreads();
    if (RANKS > 1) acquire_from_cluster();
    return __int_as_float(0x7fffffff);
}

// Returns the smallest l that top-k and top-p keep, or NaN if s.token is drawn already. largest: the largest l that the
// thread has read, or -inf.
__device__ __noinline__ float filter(const Row& row, Shared& s, int k, float p, float part, float largest) {
    Candidates among = {-INFINITY, 0.0f, ALIVE};
    if (0 < k && k < row.V) {
        Candidates largest_ones = among;
        int listed = LIST + 1;
        bool enough;
        if (k <= 2 * PASS_WARPS) {
            largest_ones.cut = kth_of_warps(s, k);
            enough = row.position(largest_ones.cut) < ALIVE;
        } else {
            const float at = row.position(largest);
            if (at < ALIVE) count(s, (int)at);
            const Found found = find(-1.0f, s, k);
            enough = found.digit >= 0;
            largest_ones.limit = found.digit + 1.0f;
        }
        if (enough) listed = gather(largest_ones, row, s);
        if (listed <= LISTED) return draw_listed(row, s, listed, k, p, part);
        // -inf if fewer than k tokens have a mass; then all tokens with a mass are kept
        among.cut = listed <= LIST ? select(false, row, s, listed, k) : min_kept(row, s, among, k, -1.0f);
    }
    return p < 1.0f ? min_kept(row, s, among, 0, p) : among.cut;
}

// grid (M SAMPLE_CLUSTER), block (SAMPLE_THREADS)
// Launched by operation (variant): sample_token (block)
extern "C" __global__ void __cluster_dims__(SAMPLE_CLUSTER, 1, 1) __launch_bounds__(SAMPLE_THREADS) sample_token(
    const float* logits,              // (M, V)
    const float* temperature,         // (B)
    const float* top_p,               // (B)
    const float* min_p,               // (B)
    const float* repetition_penalty,  // (B)
    const int* top_k,                 // (B)
    const long long* seed,            // (B)
    const int* sample,                // (B)
    unsigned char* occurred,              // (B, V): set to 1 for the token
    int* position,                    // (B): incremented, up to n_ctx - 1
    int* step,                        // (B): incremented
    int* token,                       // (B), with SAMPLE_DRAFTS (M)
    float* logprob,                   // same shape as token
    const int* row,                   // (M) or null: sequence of each row; outside 0 ... B - 1: no sequence
    int* next_token,                  // (M): a copy of token; next_token, next_position and turn: null if row is
    int* next_position,               // (M): a copy of position
    int* turn,                        // (M): incremented for every row, except with SAMPLE_DRAFTS
    const float* changes,             // (B, 258) with SAMPLE_CHANGES
    int* counts,                      // (B, V) with SAMPLE_CHANGES 2: incremented for the token
    int* report,                      // (2, 2, M) or null: token, bits of logprob, for even and odd turns (or steps)
    const int* mask_index,            // (M) with SAMPLE_MASKS: 1 + the index of the row's mask; 0: no mask
    const int* masks,                 // (R, ceil(V / 32)) with SAMPLE_MASKS: bits of allowed tokens
    const int* forced,                // (B, H) with SAMPLE_DRAFTS, or null: the token at each position, for its logprob
    int B, int V, int H, int n_ctx,
    int together) {                   // SAMPLE_DRAFTS: consecutive rows per sequence, at successive positions
    __shared__ Shared s;
    const int m = blockIdx.x / RANKS, rank = rank_in_row(), thread = threadIdx.x;
    const auto sequence = [&] { return row ? row[m] : m; };
    int b = sequence();
    let_next_start();
    if (RANKS > 1) arrive_in_cluster();
    if (b < 0 || b >= B) {
        wait_for_previous();
        if (turn && !DRAFTS && rank == 0 && thread == 0) ++turn[m];
        return;
    }
    const float heat = temperature[b], p = top_p[b], part = min_p[b];
    const int k = top_k[b], length = (V + RANKS - 1) / RANKS;
    const float penalty = repetition_penalty[b];
    for (int bin = thread; bin < BINS; bin += THREADS) s.low[bin] = s.high[bin] = 0;
    wait_for_previous();
    const int drafts = DRAFTS ? m % together : 0;  // number of draft tokens in earlier rows and this row
    const int at_position = DRAFTS ? next_position[m] : 0;
    __shared__ Row values;  // shared, because each thread would have a copy in local memory
    if (thread == 0) {
        s.bad = 0;
        values.x = logits + (long long)m * V;
        values.marks = occurred + (long long)b * V;
        values.V = V;
        values.penalty = penalty;
        values.less = 1.0f / penalty;
        const float* const own = CHANGED ? changes + (long long)b * CHANGES : nullptr;
        if (CHANGED) values.changes = step[b] + drafts < __float_as_int(own[1]) ? own : own + 1;
        if (COUNTED) {
            values.frequency = own[CHANGES - 2];
            values.presence = own[CHANGES - 1];
            const bool zero = values.frequency == 0.0f && values.presence == 0.0f;
            values.counts = zero ? nullptr : counts + (long long)b * V;
        }
        const int mask = MASKED ? mask_index[m] : 0;
        values.allowed = mask ? masks + (mask - 1LL) * ((V + 31) / 32) : nullptr;
        if (penalty == 1.0f && !(CHANGED && own[0] != 0.0f)) values.marks = nullptr;
        values.first = min(rank * length, V);
        values.end = min(values.first + length, V);
        if (DRAFTS) {
            values.drafted = next_token + m - drafts + 1;
            values.drafts = drafts;
        }
    }
    if (heat != 0.0f && thread == THREADS - 1) s.random = philox(step[b] + drafts, sample[b], seed[b]);
    if (at_position < 0) return;
    __syncthreads();
    if (RANKS > 1) wait_for_cluster();  // all blocks have started: their shared memory can be written

    Best best;
    Online online;
    const float largest = first_pass(values, s, k > 0, best, online);
    const bool none = hopeless(values, s, best.l, online);
    int id = rank == 0 ? best.id : -1;
    if (heat != 0.0f && !none) {
        if (thread == 0) {
            values.max = best.l;
            values.inverse = 1.0f / heat;
            values.scale = fminf(values.inverse * (FINE / NEAR), 1e38f);
        }
        __syncthreads();
        const float cut = filter(values, s, k, p, part, largest);
        id = cut == cut ? draw(values, s, cut, part) : rank == 0 ? s.token : -1;
    }
    if (thread > 0 || id < 0) return;
    b = sequence();  // recomputed, because a register for it would spill
    float raw = best.l;
    const bool force = DRAFTS && forced && !none;
    if (force) id = forced[(long long)b * H + next_position[m] + 1];
    if (!none && (values.marks || heat != 0.0f || force)) raw = values.x[id];
    const int now = step[b], chosen = none ? -1 : id;
    const float likely = none ? __int_as_float(0x7fffffff) : raw - online.max - logf(online.sum);
    if (DRAFTS) {
        token[m] = chosen;
        logprob[m] = likely;
        return;
    }
    const int at = min(position[b] + 1, n_ctx - 1), half = (turn ? turn[m] : now) % 2;
    position[b] = at;
    step[b] = now + 1;
    token[b] = chosen;
    logprob[b] = likely;
    if (row) next_token[m] = chosen, next_position[m] = at, turn[m] += 1;
    if (report) {  // report is in host memory: the host needs no copy
        const int M = gridDim.x / RANKS;
        int* to = report + half * 2 * M + m;
        to[0] = chosen;
        to[M] = __float_as_int(likely);
    }
    unsigned char& now_occurred = occurred[(long long)b * V + id];
    if (!none) now_occurred = CHANGED ? now_occurred | 1 : 1;
    if (COUNTED && !none) ++counts[(long long)b * V + id];
}

// grid (ceil(N / blockDim.x)), block (any)
// Launched by operation (variant): mark_occurred (occurred)
extern "C" __global__ void mark_occurred(
    const int* tokens,    // (N): tokens of all rows, concatenated
    const int* rows,      // (N): for each token, the row of `occurred`
    unsigned char* occurred,  // (B, V): set to 1 for these tokens; indices out of range are ignored
    int N, int B, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const int token = tokens[i], row = rows[i];
    if (0 <= token && token < V && 0 <= row && row < B)
        ((volatile unsigned char*)occurred)[(long long)row * V + token] = 1;
}
