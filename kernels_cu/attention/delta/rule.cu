// The gated delta rule: each head of v keeps a matrix S, which forgets, and learns to map each key to its value.
//
//   S <- decay S,   S <- S + beta (v - S k) k^T,   o = S q     token by token, in prompts and in steps
//
// A column of S here is the row of S that makes one channel of v: columns do not depend on each other. DELTA_LANES
// lanes hold DELTA_EACH columns in registers, and add their products by shuffles, in an order that depends on DELTA_K
// alone. So a token has the same bits in a prompt of any length and in a step. lib/delta.cuh describes the arrays.
//
//   delta_rule: a block processes DELTA_COLUMNS columns of a head of a slot; rows are copied to shared memory by chunk,
//       while the block computes the chunk before. The lanes add S q of a token together with S k of the next token:
//       one token then waits for the shuffles once. With many heads, two columns of a thread share the reads of a row
//   gated_rmsnorm: out = o s gamma silu(z), s = 1 / sqrt(mean(o^2) + eps) over a head; one warp per row and head
//
// Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
//
// delta_rule: grid (H, DELTA_V / DELTA_COLUMNS rounded up, B), block (DELTA_LANES, DELTA_COLUMNS / DELTA_EACH).
// gated_rmsnorm: grid (N, ceil(H / 4)), block (32, 4).
#include "lib/common.cuh"
#include "lib/copies.cuh"
#include "lib/delta.cuh"
#include "lib/overlap.cuh"

#ifndef DELTA_TILED  // whether heads of v with the same remainder share a head of k, instead of neighbours
#define DELTA_TILED 0
#endif
#ifndef DELTA_LANES
#define DELTA_LANES 8
#endif
#ifndef DELTA_COLUMNS  // a multiple of 4
#define DELTA_COLUMNS 16
#endif
#ifndef DELTA_EACH  // columns of a thread; a divisor of 4
#define DELTA_EACH 1
#endif
#ifndef DELTA_SAVED  // tokens from a state that other texts can reuse to the next
#define DELTA_SAVED 256
#endif
#ifndef DELTA_CHUNK  // tokens of a chunk
#define DELTA_CHUNK 8
#endif

constexpr int VECTORS = (DELTA_K / 4 + DELTA_LANES - 1) / DELTA_LANES;  // vectors of a column per lane
constexpr int THREADS = DELTA_LANES * DELTA_COLUMNS / DELTA_EACH;
static_assert(DELTA_COLUMNS % 4 == 0, "rows are whole vectors");
static_assert(THREADS % 32 == 0 && DELTA_COLUMNS <= 4 * 30, "a warp copies a row; two of its lanes copy no part of v");

// A chunk of tokens in shared memory. Vectors of a short head's lanes that hold no channels are zeros.
struct __align__(16) Chunk {
    float q[DELTA_CHUNK][4 * VECTORS * DELTA_LANES], k[DELTA_CHUNK][4 * VECTORS * DELTA_LANES];
    float v[DELTA_CHUNK][DELTA_COLUMNS], gates[2][DELTA_CHUNK];  // gates: decay and beta
};

// A lane's part of a row or of a column of S: 4 VECTORS channels of k.
struct Part {
    float4 of[VECTORS];

    // Calls use(vector, channel) for each of the lane's vectors with channels.
    template <typename Use>
    __device__ __forceinline__ static void each(Use use) {
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            const int channel = 4 * (n * DELTA_LANES + (int)threadIdx.x);
            if (channel < DELTA_K) use(n, channel);
        }
    }

    // Loads the lane's part of a row in shared memory.
    __device__ __forceinline__ void load(const float* row) {
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) of[n] = ld_vec(row + 4 * (n * DELTA_LANES + threadIdx.x));
    }

    // Returns the lane's sum of the products with a row.
    __device__ __forceinline__ float times(const Part& row) const {
        float4 sums = {};
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            sums.x = fmaf(of[n].x, row.of[n].x, sums.x);
            sums.y = fmaf(of[n].y, row.of[n].y, sums.y);
            sums.z = fmaf(of[n].z, row.of[n].z, sums.z);
            sums.w = fmaf(of[n].w, row.of[n].w, sums.w);
        }
        return (sums.x + sums.y) + (sums.z + sums.w);
    }

    // Adds `change` times a row to the thread's part of a column of the state.
    __device__ __forceinline__ void add(const Part& row, float change) {
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            of[n].x = fmaf(row.of[n].x, change, of[n].x);
            of[n].y = fmaf(row.of[n].y, change, of[n].y);
            of[n].z = fmaf(row.of[n].z, change, of[n].z);
            of[n].w = fmaf(row.of[n].w, change, of[n].w);
        }
    }

    // Multiplies the thread's part of a column of the state by a factor.
    __device__ __forceinline__ void decay(float factor) {
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            of[n].x = __fmul_rn(of[n].x, factor);
            of[n].y = __fmul_rn(of[n].y, factor);
            of[n].z = __fmul_rn(of[n].z, factor);
            of[n].w = __fmul_rn(of[n].w, factor);
        }
    }
};

// A token's part in the rule: its key, decay and beta, and its channels of v for the thread's columns.
struct Token {
    Part key;
    float decay, beta, v[DELTA_EACH];

    // Loads token t of a chunk. column: first of the thread's DELTA_EACH columns of v.
    __device__ __forceinline__ void load(const Chunk& chunk, int t, int column) {
        key.load(chunk.k[t]);
        decay = chunk.gates[0][t];
        beta = chunk.gates[1][t];
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e) v[e] = chunk.v[t][column + e];
    }
};

// Launched by operation (variant): delta_rule (delta rule)
extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_rule(
    const float* x,     // (N, W)
    const float* ba,    // (N, 2 H)
    const float* rows,  // (N + 7 B, D + 2 H)
    const int* spans,   // (B, 6)
    float* state,       // (B, 2, P); or null
    float* recent,      // (B, 16, D + 2 H); or null
    float* pool,        // (S, P); or null
    const int* saved,   // (B, M); or null
    float* out,         // (N, H DELTA_V)
    long long W, long long P, int D, int H, int n_k_head, int N, int M, int steps) {
    let_next_start();
    wait_for_previous();
    __shared__ Chunk chunks[2];
    const int head = blockIdx.x, slot = blockIdx.z, begin = blockIdx.y * DELTA_COLUMNS;
    const int of_block = threadIdx.y * DELTA_EACH, column = begin + of_block;  // the thread's first column
    const int thread = threadIdx.y * DELTA_LANES + threadIdx.x;
    const int of_k = DELTA_TILED ? head % n_k_head : head / (H / n_k_head);
    const int K = n_k_head * DELTA_K, Y = D + 2 * H;
    const Span span = span_of(spans, slot);
    if (span.start == span.end) return;
    const bool holds = column < DELTA_V;
    const long long place = 3LL * D + ((long long)head * DELTA_V + column) * DELTA_K;  // place of the column in a state

    // Starts copies of the chunk of tokens from a position on: a warp copies the row of a token.
    const int lane = thread % 32;
    const bool of_v = 4 * lane < DELTA_COLUMNS && begin + 4 * lane < DELTA_V;  // whether the lane copies a part of v
    const float* const q = rows + of_k * DELTA_K + 4 * lane;
    const float* const v = rows + 2 * K + head * DELTA_V + begin + 4 * lane;
    const float* const gate = rows + D + head + (lane == 31 ? H : 0);
    const auto copy = [&](Chunk& to, int from) {
#pragma unroll
        for (int n = 0; n < DELTA_CHUNK; n += THREADS / 32) {
            const int t = n + thread / 32;
            if (from + t >= span.end) break;
            const long long row = (long long)row_of(span, slot, from + t, N) * Y;
#pragma unroll
            for (int c = 0; c < DELTA_K; c += 4 * 32) {
                if (c + 4 * lane >= DELTA_K) break;
                copy_vec(to.q[t] + c + 4 * lane, q + row + c);
                copy_vec(to.k[t] + c + 4 * lane, q + K + row + c);
            }
            if (of_v) copy_vec(to.v[t] + 4 * lane, v + row);
            if (lane >= 30) copy_float(to.gates[lane - 30] + t, gate + row);
        }
    };

    if (DELTA_K < 4 * VECTORS * DELTA_LANES) {
        for (int i = thread; i < 2 * (int)sizeof(Chunk) / 4; i += THREADS) reinterpret_cast<float*>(chunks)[i] = 0.0f;
        __syncthreads();
    }
    Part own[DELTA_EACH] = {}, query = {};
    copy(chunks[0], span.base);
    if (span.source >= 0 && holds) {
        const float* const from = state + (2LL * slot + span.source) * P + place;
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e) {
            Part::each([&](int n, int channel) {
                own[e].of[n] = __ldcg(reinterpret_cast<const float4*>(from + e * DELTA_K + channel));
            });
        }
    }
    const int written = steps ? span.start + 1 : span.end;  // number of tokens of the state that the pass writes
    // Returns the entry of `pool` for the state after `tokens` tokens; the second one for the last token.
    const auto entry_of = [&](int tokens, bool last) {
        if (!saved || tokens <= span.start || (!last && tokens % DELTA_SAVED > 0)) return -1;
        return __ldcg(saved + slot * M + (last ? M : tokens / DELTA_SAVED) - 1);
    };

    // The blocks of a slot divide its last three rows and its recent rows.
    if (state) {
        const DeltaRows of = {x, ba, state, recent, W, P, D, H, slot, span};
        const int block = blockIdx.y * gridDim.x + blockIdx.x, all = gridDim.x * gridDim.y * THREADS;
        const auto store_rows = [&](float* to, int tokens) {
            for (int i = block * THREADS + thread; i < 3 * D; i += all) {
                const float* const row = of.channels(tokens - 3 + i / D);
                to[i] = row ? __ldcg(row + i % D) : 0.0f;
            }
        };
        store_rows(state + (2LL * slot + span.target) * P, written);
        for (int tokens = span.start / DELTA_SAVED * DELTA_SAVED + DELTA_SAVED; saved && tokens <= span.end;
             tokens += DELTA_SAVED) {
            const int entry = entry_of(tokens, false);
            if (entry >= 0) store_rows(pool + entry * P, tokens);
        }
        const int last = entry_of(span.end, true);
        if (last >= 0) store_rows(pool + last * P, span.end);
        for (int i = block * THREADS + thread; i < (span.end - written) * Y; i += all) {
            const int position = written + i / Y, c = i % Y;
            const float* const row = c < D ? of.channels(position) : of.gates(position) - D;
            recent[((long long)slot * DELTA_RECENT + position % DELTA_RECENT) * Y + c] = __ldcg(row + c);
        }
    }

    const auto store = [&](float* to) {
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e)
            Part::each([&](int n, int channel) { st_vec(to + place + e * DELTA_K + channel, own[e].of[n]); });
    };
    // Writes o of the latest token, whose position is `tokens` - 1.
    int tokens = span.base;  // number of tokens that S holds
    float* to = out + ((long long)(span.first + span.base - span.start - 1) * H + head) * DELTA_V + column;
    const bool writes = holds && threadIdx.x == 0, lost = span.source == -2;
    const auto write = [&](const float* made) {
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e)
            if (writes && tokens > span.start) to[e] = lost ? __int_as_float(0x7fffffff) : made[e];
        to += H * DELTA_V;
    };
    // Adds token t of a chunk to S, and writes o of the token before, whose query is `query`. The reads of the next
    // token are requested before the shuffles, during which they arrive; the barrier keeps them there.
    const auto process = [&](const Chunk& chunk, int t, const Token& token, Token& next) {
        float sums[2 * DELTA_EACH];  // S q of the token before, then S k
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e) {
            sums[DELTA_EACH + e] = own[e].times(token.key);
            sums[e] = own[e].times(query);
        }
        next.load(chunk, min(t + 1, DELTA_CHUNK - 1), of_block);
        query.load(chunk.q[t]);
        __syncwarp();
#pragma unroll
        for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int n = 0; n < 2 * DELTA_EACH; ++n) sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], distance);
#pragma unroll
        for (int e = 0; e < DELTA_EACH; ++e) {
            own[e].decay(token.decay);
            own[e].add(token.key, __fmul_rn(token.beta, fmaf(-token.decay, sums[DELTA_EACH + e], token.v[e])));
        }
        write(sums);
        ++tokens;
    };
    for (int turn = 0; tokens < span.end; turn ^= 1) {
        wait_for_copies();
        __syncthreads();
        const int after = min(tokens + DELTA_CHUNK, span.end);
        if (after < span.end) copy(chunks[turn ^ 1], after);
        const Chunk& chunk = chunks[turn];
        for (int t = 0; tokens < after;) {
            // States are only stored between two runs of this loop, which keeps it short.
            const int whole = (tokens / DELTA_SAVED + 1) * DELTA_SAVED, first = min(after, whole);
            const int stop = tokens < written ? min(first, written) : first;
            Token one, other;
            one.load(chunk, t, of_block);
#pragma unroll 1
            for (; tokens + 1 < stop; t += 2) {
                process(chunk, t, one, other);
                process(chunk, t + 1, other, one);
            }
            if (tokens < stop) process(chunk, t++, one, other);
            if (!holds) continue;
            if (state && tokens == written) store(state + (2LL * slot + span.target) * P);
            const int kept = entry_of(tokens, false), last = tokens == span.end ? entry_of(tokens, true) : -1;
            if (kept >= 0) store(pool + kept * P);
            if (last >= 0) store(pool + last * P);
        }
    }
    float made[DELTA_EACH];
#pragma unroll
    for (int e = 0; e < DELTA_EACH; ++e) made[e] = lanes_sum<DELTA_LANES>(own[e].times(query));
    write(made);
}

// Launched by operation (variant): gated_rmsnorm (gated norm)
extern "C" __global__ void gated_rmsnorm(
    const float* o,      // (N, H DELTA_V)
    const float* x,      // (N, W): the last H DELTA_V channels are z
    const float* gamma,  // (DELTA_V)
    float* out,          // (N, H DELTA_V)
    long long W, int H, float eps) {
    let_next_start();
    wait_for_previous();
    const long long n = blockIdx.x;
    const int head = blockIdx.y * blockDim.y + threadIdx.y, width = H * DELTA_V;
    if (head >= H) return;
    constexpr int VALUES = (DELTA_V + 31) / 32;
    float value[VALUES], square = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int c = threadIdx.x + 32 * i;
        value[i] = c < DELTA_V ? __ldcg(o + n * width + head * DELTA_V + c) : 0.0f;
        square = fmaf(value[i], value[i], square);
    }
    const float factor = rsqrtf(fmaf(lanes_sum<32>(square), 1.0f / DELTA_V, eps));
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int c = threadIdx.x + 32 * i;
        if (c >= DELTA_V) continue;
        const float z = __ldcg(x + (n + 1) * W - width + head * DELTA_V + c);
        const float normed = __fmul_rn(__fmul_rn(value[i], factor), gamma[c]);
        out[n * width + head * DELTA_V + c] = __fmul_rn(normed, z / (1.0f + expf(-z)));
    }
}
