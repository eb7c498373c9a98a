// Chooses the next token of each row from its logits, on the device.
//
//   logits (M, V); per sequence: temperature, top_p, min_p, repetition_penalty, top_k, seed, sample (B);
//   seen (B, V): 1 for tokens that have occurred; step (B): tokens drawn so far; position, token, logprob (B);
//   row (M): the sequence of each row of logits. Without it, row m is that of sequence m
//
//   l     = logit; for a seen token, multiplied by 1 / penalty if it is positive, else by the penalty
//   mass  = floor(2^40 exp((l - max l) / temperature)), an integer
//   top-k   keeps the k largest l. top-p keeps the fewest largest of these whose masses reach a fraction p of all. Ties
//           with the last one kept are kept as well. min-p keeps tokens with a mass of at least min_p 2^40. top_k 0,
//           top_p 1 and min_p 0 keep all tokens.
//   draw    r = floor(u (sum of masses kept)), with u in [0, 1) of 64 bits: the first token at which the running sum of
//           masses kept, in order of ids, exceeds r. u is Philox4x32-10 of the counter (step, sample), with key `seed`.
//   temperature 0: the largest l, and among equals the lowest id
//
// After exp all arithmetic is on integers, so that the order of additions does not matter: the same row gives the same
// token alone and in any batch. logprob is the token's log-probability under the unmodified logits. A row with NaN, or
// with only -inf, gives token -1.
//
//   sample_token   one block per row. The first pass finds maximum and log-sum-exp and suffices for temperature 0.
//                  A last pass adds up the masses kept and draws. top-k and top-p search the smallest l kept among
//                  candidates, digit by digit, each with a histogram: of (max - l) / temperature, then of the bits of l
//   mark_seen      sets seen for the tokens of prompts
//
//   candidates    top-k: l at least as large as the k-th largest of the threads' own maxima
//                 top-p: mass above (1 - p) / V of the total, since all smaller masses together do not reach 1 - p
#include "tokens/candidates.cuh"
#include "lib/overlap.cuh"

// A fraction p of a mass, rounded up, and at least 1.
__device__ __forceinline__ u64 part_of(float p, u64 mass) {
    const u64 part = (u64)(p * 18446744073709551616.0f);  // p 2^64
    const u64 need = __umul64hi(part, mass) + (part * mass != 0);
    return need > 0 ? need : 1;
}

// 64 random bits: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
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

struct Best {
    float l;
    int id;  // the lowest id with this l

    __device__ __forceinline__ void add(const Best& other) {
        const bool better = other.l > l || (other.l == l && other.id < id);
        *this = {better ? other.l : l, better ? other.id : id};
    }

    __device__ __forceinline__ Best of_warp() const {  // combined with the other lanes
        Best all = *this;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, all.l, distance);
            all.add({other, __shfl_xor_sync(0xffffffffu, all.id, distance)});
        }
        return all;
    }
};

// Finds the maximum of a row, and the maximum and sum of its logits. The order of additions depends only on V.
__device__ void first_pass(const Row& row, Shared& s, Best& best, Online& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    best = {-INFINITY, 0x7fffffff};
#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
        Best own = {-INFINITY, 0x7fffffff};
        Online online = {-INFINITY, 0.0f};
        const auto take = [&](int first, const float(&raw)[FIRST], const float* l) {
            online.take(raw);
#pragma unroll
            for (int i = 0; i < FIRST; ++i) {
                if (l[i] > own.l) own = {l[i], first + i * PASS};
            }
        };
        visit<FIRST, true>(row, turn * THREADS + threadIdx.x, row.V, PASS, take);
        best.add(own);
        online = online.of_warp();
        if (lane == 0) s.online[turn * WARPS + warp] = online;
    }
    const Best of_lanes = best.of_warp();
    if (lane == 0) s.l[warp] = of_lanes.l, s.id[warp] = of_lanes.id;
    __syncthreads();
    all = s.online[lane].of_warp();
}

// The best of the warps' results.
__device__ Best best_of_warps(const Shared& s) {
    const int lane = threadIdx.x % 32;
    return Best{lane < WARPS ? s.l[lane] : -INFINITY, lane < WARPS ? s.id[lane] : 0x7fffffff}.of_warp();
}

// Whether the row has no valid token. +inf makes the sum NaN as well; only then the row is searched for NaN itself.
__device__ bool hopeless(const Row& row, Shared& s, const Online& online) {
    if (row.max == -INFINITY) return true;
    if (online.sum == online.sum) return false;
    if (online.max < INFINITY) return true;
    __syncthreads();
    if (threadIdx.x == 0) s.bad = 0;
    __syncthreads();
    visit<LATER>(row, threadIdx.x, row.V, THREADS, [&](int, const float* raw, const float*) {
#pragma unroll
        for (int i = 0; i < LATER; ++i) {
            if (raw[i] != raw[i]) s.bad = 1;
        }
    });
    __syncthreads();
    return s.bad;
}

// filter() and draw() are not inlined: with them, the kernel would spill registers.

// Returns the smallest l that top-k and top-p keep. largest: the largest l that this thread has seen.
__device__ __noinline__ float filter(const Row& row, Shared& s, int k, float p, float largest) {
    Candidates among;
    u64 all, these, rest;
    if (0 < k && k < row.V) {
        int digit;
        if (k <= THREADS) {
            if (row.position(largest) < ALIVE) add(s, (int)row.position(largest), 1);
            if (find(s, k, digit, rest)) among.limit = digit + 1;
        }
        among.gather(false, row, s, all, all);
        if (among.count >= k) among.cut = least_kept(false, row, s, among, k);  // else all tokens that have a mass stay
    }
    if (p >= 1.0f) return among.cut;
    if (among.cut > -INFINITY) {
        all = among.mass(row, s);
    } else {
        const float usual = row.position(largest) < ALIVE ? row.weight(largest) : 0.0f;
        const u64 least = scan_block((u64)(usual * UNIT), s).total;  // the mass of the threads' maxima alone
        const float share = (1.0f - p) / row.V * ((float)least / UNIT);
        among.limit = fminf(1.0f - __logf(share) * (BINS / REACH), ALIVE);
        among.gather(true, row, s, all, these);
        if (these < part_of(p, all)) {
            among.limit = ALIVE;
            among.gather(false, row, s, these, these);
        }
    }
    return least_kept(true, row, s, among, part_of(p, all));
}

// Draws a token with a mass of at least `least` and l >= cut.
__device__ __noinline__ void draw(const Row& row, Shared& s, float cut, u64 least) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int length = (row.V + WARPS - 1) / WARPS, first = warp * length;  // a contiguous part of the row per warp
    const auto kept = [&](float l) {
        if (!(l >= cut)) return (u64)0;
        const u64 mass = row.mass(l);
        return mass >= least ? mass : 0;
    };
    u64 sum = 0;
    visit<LATER>(row, first + lane, min(first + length, row.V), 32, [&](int, const float*, const float* l) {
#pragma unroll
        for (int i = 0; i < LATER; ++i) sum += kept(l[i]);
    });
    const Scan scan = scan_block(sum, s);
    const u64 r = __umul64hi(s.random, scan.total);
    const u64 before = __shfl_sync(0xffffffffu, scan.before, 0);
    const u64 after = __shfl_sync(0xffffffffu, scan.before + sum, 31);
    if (lane == 0 && before <= r && r < after) s.digit = first, s.rest = r - before;
    __syncthreads();
    const int begin = s.digit, end = min(begin + length, row.V);
    u64 rest = s.rest;
    for (int base = begin; base < end; base += THREADS) {
        const int id = base + threadIdx.x;
        u64 mass = 0;
        float raw = 0.0f;
        visit<1>(row, id, min(id + 1, end), 1, [&](int, const float* x, const float* l) {
            mass = kept(l[0]);
            raw = x[0];
        });
        const Scan here = scan_block(mass, s);
        if (here.before <= rest && rest < here.before + mass) s.token = id, s.raw = raw;
        if (rest < here.total) break;
        rest -= here.total;
    }
    __syncthreads();
}

// grid (M), block (SAMPLE_THREADS)
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS) sample_token(
    const float* logits,              // (M, V)
    const float* temperature,         // (B)
    const float* top_p,               // (B)
    const float* min_p,               // (B)
    const float* repetition_penalty,  // (B)
    const int* top_k,                 // (B)
    const long long* seed,            // (B)
    const int* sample,                // (B)
    unsigned char* seen,              // (B, V): set to 1 for the token
    int* position,                    // (B): incremented, up to n_ctx - 1
    int* step,                        // (B): incremented
    int* token,                       // (B)
    float* logprob,                   // (B)
    const int* row,                   // (M) or null: outside 0 ... B - 1, nothing is sampled
    int* next_token,                  // (M) or null, as are the next two: a copy of token
    int* next_position,               // (M): a copy of position
    int* turn,                        // (M): incremented, also where nothing is sampled
    int* report,                      // (2, 2, M) or null: token and bits of logprob, of even and odd turns (or steps)
    int B, int V, int n_ctx) {
    __shared__ Shared s;
    const int m = blockIdx.x, thread = threadIdx.x;
    const auto sequence = [&] { return row ? row[m] : m; };
    int b = sequence();
    let_next_start();
    if (b < 0 || b >= B) {
        wait_for_previous();
        if (turn && thread == 0) ++turn[m];
        return;
    }
    const float heat = temperature[b], p = top_p[b], part = min_p[b];
    const int k = top_k[b];
    Row values = {logits + (long long)m * V, seen + (long long)b * V, V, repetition_penalty[b]};
    values.less = 1.0f / values.penalty;
    if (values.penalty == 1.0f) values.seen = nullptr;
    for (int bin = thread; bin < BINS; bin += THREADS) s.low[bin] = s.high[bin] = 0;
    wait_for_previous();
    if (heat != 0.0f && thread == THREADS - 1) s.random = philox(step[b], sample[b], seed[b]);

    Best best;
    Online online;
    first_pass(values, s, best, online);
    const float largest = best.l;  // of this thread
    best = best_of_warps(s);
    values.max = best.l;

    const bool none = hopeless(values, s, online);
    int id = best.id;
    float raw = best.l;
    if (heat == 0.0f) {
        if (values.seen && !none) raw = values.x[id];
    } else if (!none) {
        values.inverse = 1.0f / heat;
        values.scale = fminf(values.inverse * (BINS / REACH), 1e38f);
        const float cut = filter(values, s, k, p, largest);
        draw(values, s, cut, (u64)(part * UNIT));
        id = s.token;
        raw = s.raw;
    }
    if (thread > 0) return;
    b = sequence();  // again, as a register for it would spill
    const int now = step[b], chosen = none ? -1 : id;
    const float likely = none ? __int_as_float(0x7fffffff) : raw - online.max - logf(online.sum);
    const int at = min(position[b] + 1, n_ctx - 1), half = (turn ? turn[m] : now) % 2;
    position[b] = at;
    step[b] = now + 1;
    token[b] = chosen;
    logprob[b] = likely;
    if (row) next_token[m] = chosen, next_position[m] = at, turn[m] += 1;
    if (report) {  // in host memory, so that the host needs no copy
        int* to = report + half * 2 * gridDim.x + m;
        to[0] = chosen;
        to[gridDim.x] = __float_as_int(likely);
    }
    if (!none) seen[(long long)b * V + id] = 1;
}

// grid (ceil(N / blockDim.x)), block (any)
extern "C" __global__ void mark_seen(
    const int* tokens,    // (N): of all rows, concatenated
    const int* rows,      // (N): the row of each token
    unsigned char* seen,  // (B, V): set to 1 for these tokens; indices outside are ignored
    int N, int B, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const int token = tokens[i], row = rows[i];
    if (0 <= token && token < V && 0 <= row && row < B) seen[(long long)row * V + token] = 1;
}
