// Matrix products of a GPT-2 layer, and lm_head, in decoding, where all weights are read to process one token:
//
//   decode_cores: few rows: all weights requested before x; LayerNorm of x in each block.
//       out = [residual +] [gelu] (x W^T * scale + bias); with DECODE_NORM, x is replaced by its LayerNorm
//   decode_cores (qkv_matvec): stores q in an array, k and v in the KV cache. EPILOGUE is EPILOGUE_APPEND
//       (lib/decode/epilogues.cuh)
//
// W is (N, K), one row per output. Reading W takes only a few microseconds, about two memory latencies. Therefore as
// little work as possible is left for the time after the weights arrive:
//
//   all threads   [ load weights | wait for x | x, its LayerNorm | products | sums, epilogue ]
//
//   block   COLUMNS neighbouring outputs, DECODE_COLUMNS of them per group
//   group   DECODE_SPLIT warps, which divide K into units of 32 * DECODE_WIDTH weights: warp p has units p,
//           p + DECODE_SPLIT, ...
//   thread  keeps a chunk of weights in flight: DECODE_STEPS vectors of each column of its group. The thread multiplies
//           the chunk by DECODE_TOGETHER rows of x at a time. The code is short on purpose, because a short kernel also
//           waits for its instructions to load: 2 rows at a time need fewer instructions than 8, and less time
//
// For each chunk of K, the products of an output are added within each lane and then over the lanes; these sums are
// added over the chunks, then over the warps. The bits of an output depend only on DECODE_WIDTH, DECODE_SPLIT and
// DECODE_STEPS, not on how many rows or columns a block computes. Blocks for rows beyond DECODE_ROWS read W again, at
// best from the L2 cache. Weights are loaded while the previous kernel is still running (lib/overlap.cuh).
//
// With DECODE_LOOP, a block processes several groups of columns, one after the other, and prefetches the next weights
// as soon as a register is free. This is for products with more columns than one grid can hold, such as lm_head.
//
// With DECODE_SIDE, a block computes a tile of more rows (matmul/decode/cores_tile.cuh), with the same bits, without
// LayerNorm.
//
// grid (ceil(N / COLUMNS) or fewer with DECODE_LOOP, ceil(M / DECODE_ROWS)), block (32 * DECODE_GROUPS * DECODE_SPLIT).
// `shared_floats` of the Python operation `linear` computes the dynamic shared memory. Any M, N, K; DECODE_WIDTH and
// DECODE_X divide K.
//
// Measured: docs/experiments.md#decode_cores
#include "matmul/decode/cores.cuh"
#include "lib/decode/epilogues.cuh"
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

#if DECODE_SIDE
#include "matmul/decode/cores_tile.cuh"
constexpr int BLOCK = tile::THREADS;
#else
constexpr int BLOCK = THREADS;

// A thread's weights in flight: DECODE_STEPS vectors of each of the DECODE_COLUMNS columns of its group.
struct Stream {
    Weights raw[DECODE_STEPS][DECODE_COLUMNS];
    const W* w;
    const int N, k;  // k: index along K of the thread's first weight

    __device__ Stream(const W* w, int N, int k) : w(w), N(N), k(k) {}

    // Loads vector s of chunk `chunk` for the DECODE_COLUMNS columns from n on. In place of columns after the last one,
    // it loads the last column again, and the sums are discarded. For positions after the end of K, weights are zero.
    __device__ __forceinline__ void fetch(int s, int n, int chunk) {
        const int at = chunk * CHUNK + s * STEP + k;
#pragma unroll
        for (int c = 0; c < DECODE_COLUMNS; ++c) {
            raw[s][c] = {};
            if (PADDED == DECODE_K || at < DECODE_K) {
                raw[s][c] = stream_in<Weights>(w + (long long)min(n + c, N - 1) * DECODE_K + at);
            }
        }
    }

    // Adds the products of vector s of each column and the values x of each row, at the same positions along K, to
    // `sum`.
    __device__ __forceinline__ void use(int s, const float (&x)[DECODE_TOGETHER][DECODE_WIDTH],
                                        float (&sum)[VALUES]) const {
#pragma unroll
        for (int c = 0; c < DECODE_COLUMNS; ++c) {
            float v[DECODE_WIDTH];
            raw[s][c].unpack(v);
#pragma unroll
            for (int r = 0; r < DECODE_TOGETHER; ++r) {
#pragma unroll
                for (int e = 0; e < DECODE_WIDTH; ++e) {
                    sum[r * DECODE_COLUMNS + c] = fmaf(v[e], x[r][e], sum[r * DECODE_COLUMNS + c]);
                }
            }
        }
    }
};

// Adds VALUES values over the lanes of a warp, in the order of lanes_sum(). Each step, for one bit of the lane number,
// halves the number of values per lane: lanes whose bit is 1 keep the upper half. At the end a lane holds the sums of
// `count` values from index `first` on.
struct Folded {
    int first = 0, count = VALUES;

    __device__ explicit Folded(int lane) {
        int n = VALUES;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const int half = (n + 1) / 2;
            if (lane & distance) first += half, count = max(count - half, 0);
            else count = min(count, half);
            n = half;
        }
    }

    // Adds v, (DECODE_TOGETHER, DECODE_COLUMNS) sums of each lane, over the lanes. A lane keeps v[0] to v[count - 1].
    __device__ static void fold(int lane, float (&v)[VALUES]) {
        int n = VALUES;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            const int half = (n + 1) / 2;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float low = v[i], high = i + half < n ? v[i + half] : 0.0f;
                const bool upper = lane & distance;
                v[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
            }
            n = half;
        }
    }
};

// An output that this thread completes. `there`: whether the output exists.
template <typename Late>
struct Last {
    int r, column;  // row; column relative to the team's first column
    bool there;
    float scale, bias;
    Late late;
};

// Computes all outputs of the block: for each DECODE_TOGETHER rows the sums of a thread, of a warp, of the warps.
template <typename End>
__device__ __forceinline__ void multiply(const W* w, const float* scale, const float* bias, Rows& input,
                                         const End& end, int M, int N) {
    // A team: the threads that exchange sums and complete outputs. A team is a block or, if one warp multiplies all of
    // K (ALONE), a warp.
    constexpr bool ALONE = DECODE_SPLIT == 1;
    constexpr int TEAM = ALONE ? 32 : THREADS, ACROSS = ALONE ? DECODE_COLUMNS : COLUMNS;  // ACROSS: columns per team
    constexpr int ENDS = (DECODE_ROWS * ACROSS + TEAM - 1) / TEAM;
    extern __shared__ float4 shared[];
    float* x_s = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / DECODE_SPLIT, part = warp % DECODE_SPLIT;
    const int before = group * DECODE_COLUMNS, apart = ALONE ? before : 0;  // first column of the group; of the team
    float* sums = x_s + Rows::FLOATS + DECODE_ROWS * apart;            // (DECODE_SPLIT, DECODE_ROWS, ACROSS)
    int start = blockIdx.x * COLUMNS;                                   // the block's first column

    Last<typename End::Late> last[ENDS];
    const Folded own(lane);
#pragma unroll
    for (int i = 0; i < ENDS; ++i) {
        const int flat = i * TEAM + (ALONE ? lane : (int)threadIdx.x);
        last[i].r = flat / ACROSS;
        last[i].column = flat % ACROSS;
        last[i].there = flat < DECODE_ROWS * ACROSS && input.first + last[i].r < M;
    }
    const auto meet = [] {
        if (ALONE) __syncwarp();
        else __syncthreads();
    };
    const auto constants = [&] {
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            const int n = min(start + apart + last[i].column, N - 1);
            last[i].scale = scale ? constant(scale + n) : 1.0f;
            last[i].bias = bias ? constant(bias + n) : 0.0f;
        }
    };
    const auto late = [&] {
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            const int n = start + apart + last[i].column;
            if (last[i].there && n < N) last[i].late = end.late(input.first + last[i].r, n);
        }
    };

    Stream stream(w, N, (part * 32 + lane) * DECODE_WIDTH);
#pragma unroll
    for (int s = 0; s < DECODE_STEPS; ++s) stream.fetch(s, start + before, 0);
    if (!DECODE_LOOP) constants();
    input.prefetch();
    let_next_start();
    wait_for_previous();
    float held[OWN][DECODE_WIDTH];
    input.bring(x_s, held);
    if (!DECODE_LOOP) late();

    for (;;) {
        const int next = start + (int)gridDim.x * COLUMNS;
        const bool more = DECODE_LOOP && next < N;
        if (DECODE_LOOP) constants(), late();
#pragma unroll Rows::HELD ? CHUNKS : 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const bool done = chunk + 1 == CHUNKS;
#pragma unroll 1
            for (int r = 0; r < DECODE_ROWS; r += DECODE_TOGETHER) {
                float sum[VALUES] = {};
#pragma unroll
                for (int s = 0; s < DECODE_STEPS; ++s) {
                    float x[DECODE_TOGETHER][DECODE_WIDTH];
#pragma unroll
                    for (int t = 0; t < DECODE_TOGETHER; ++t) {
                        if constexpr (Rows::HELD) {
#pragma unroll
                            for (int e = 0; e < DECODE_WIDTH; ++e) x[t][e] = held[chunk * DECODE_STEPS + s][e];
                        } else {
                            read_own(x[t], chunk * DECODE_STEPS + s, x_s + (r + t) * PADDED);
                        }
                    }
                    stream.use(s, x, sum);
                    if (r + DECODE_TOGETHER == DECODE_ROWS && (!done || more)) {
                        stream.fetch(s, (done ? next : start) + before, done ? 0 : chunk + 1);
                    }
                }
                Folded::fold(lane, sum);
#pragma unroll
                for (int i = 0; i < (VALUES + 31) / 32; ++i) {
                    const int flat = own.first + i, column = before - apart + flat % DECODE_COLUMNS;
                    float* to = sums + (part * DECODE_ROWS + r + flat / DECODE_COLUMNS) * ACROSS + column;
                    if (i < own.count) *to = chunk == 0 ? sum[i] : *to + sum[i];
                }
            }
        }
        meet();
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            const int n = start + apart + last[i].column;
            if (!last[i].there || n >= N) continue;
            const float* from = sums + last[i].r * ACROSS + last[i].column;
            float total = 0.0f;
#pragma unroll
            for (int p = 0; p < DECODE_SPLIT; ++p) total += from[p * DECODE_ROWS * ACROSS];
            const float v = end.value(fmaf(total, last[i].scale, last[i].bias), last[i].late);
            end.store(input.first + last[i].r, n, v, last[i].late);
        }
        if (!more) break;
        start = next;
        meet();  // all threads have read `sums`
    }
}

#endif

// Launched by operation (variant): linear (matvec), linear_qkv (qkv_matvec)
extern "C" __global__ void __launch_bounds__(BLOCK, DECODE_BLOCKS) decode_cores(
    const float* x,                   // (M, K)
    const float* __restrict__ gamma,  // (K), with DECODE_NORM
    const float* __restrict__ beta,   // (K), with DECODE_NORM
    const W* __restrict__ w,          // (N, K)
    const float* __restrict__ scale,  // (N) or null
    const float* __restrict__ bias,   // (N) or null
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N); with EPILOGUE_APPEND (M, C), q
    const int* row,                   // (M), with EPILOGUE_APPEND
    const int* position,              // (M), with EPILOGUE_APPEND
    KV* k_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    KV* v_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    float eps, int M, int N, int gelu, int C, int B, int n_ctx) {
#if EPILOGUE == EPILOGUE_APPEND
    const Append end{out, k_cache, v_cache, row, position, C, B, n_ctx};
#else
    const Add end{residual, out, N, gelu};
#endif
#if DECODE_SIDE
    tile::multiply(x, w, scale, bias, end, M, N);
#else
    Rows rows{x, gamma, beta, eps, M, (int)blockIdx.y * DECODE_ROWS, {}};
    multiply(w, scale, bias, rows, end, M, N);
#endif
}
