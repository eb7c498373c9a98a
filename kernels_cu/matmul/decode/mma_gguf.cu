// Matrix products of decoding with GGUF weights. Sums are added in the order of lib/decode/order.cuh, so the bits of an
// output row do not depend on the number of rows:
//
//   decode_mma_gguf: GGUF weights, copied to shared memory while the previous columns are multiplied.
//       out = [residual +] [gelu] (x W^T + bias), where x can be replaced by its LayerNorm or RMSNorm; with DECODE_UP,
//       for two matrices, out = silu(x W^T) (x up^T); with DECODE_OUT_OPERAND, out is stored as 16-bit terms, and with
//       OPERAND_SUMS followed by the sums of its chunks (lib/chunk_sums.cuh)
//   decode_mma_gguf_parts: without clusters, GGUF_PARTS blocks have the same columns, and divide the splits of K. They
//       store sums in memory, which the last of these blocks adds up
//   decode_mma_gguf_experts: GGUF weights of experts: a block multiplies the rows that chose one expert by columns of
//       this expert's matrix, as in matmul/decode/mma_experts.cu
//
// EPILOGUE selects other outputs (lib/decode/epilogues.cuh):
//
//   decode_mma_gguf (qkv_gguf): EPILOGUE_APPEND stores q in an array, k and v in the KV cache
//   decode_mma_gguf (linear_sums_gguf): EPILOGUE_ADD_SUMS also adds split sums to the residual (lib/split_sums.cuh)
//   decode_mma_gguf (rope_gguf): EPILOGUE_APPEND_ROPE rotates q and k before it stores them. Split sums can be added to
//       x
//
// The grid is persistent: a block processes several groups of columns. It loads x once, and weights arrive continuously
// in a ring buffer in shared memory (lib/decode/mma_gguf.cuh). GGUF_TOGETHER selects how work is divided; results have
// the same bits. A split is one of up to 8 ranges of K:
//
//   1, together   a block multiplies all splits, 16 columns at a time; each warp has one split. For few rows, whose x
//                 fits in shared memory or, with GGUF_HELD, in registers
//   0, apart      a block multiplies one split, for up to 64 rows; each warp has 16 columns. The blocks of a cluster
//                 have the same columns and one split each. They read each other's sums after multiplying the next
//                 columns: block r reads rows r, r + GGUF_CLUSTER, ... With GGUF_CLUSTER 1, a block multiplies all
//                 splits, one after the other. With DECODE_OPERAND, x is stored as 16-bit terms, of which shared memory
//                 holds a few units (lib/decode/mma_copied.cuh); else it is floats (lib/decode/mma_staged.cuh)
//
// If enough multiprocessors are free, 9 to 64 rows are divided among blocks of 8 rows that multiply all splits (and, up
// to 32 rows, compute the norm).
//
// A block of 64 rows needs all registers and shared memory of a multiprocessor, so only its own warps can hide
// latencies. Clusters of eight blocks fit on 112 of the 132 multiprocessors of an H100. Data that the epilogue needs
// besides the sums is loaded while the sums are computed.
//
// Measured: docs/experiments.md#products-with-blocks-of-gguf
//
// On Hopper, matmul/decode/wgmma_gguf.cu is used for more than 8 rows if x is rounded to one term.
//
// grid (any multiple of GGUF_CLUSTER, ceil(M / DECODE_ROWS)), block (32 * WARPS). `geometry` of the Python module
// `linear_gguf` computes the dynamic shared memory. The range of outputs of each GGUF type begins at a multiple of the
// block's columns and, with DECODE_ROPE, at the start of a head.
#define WEIGHT_GGUF 1
#ifndef GGUF_TOGETHER
#define GGUF_TOGETHER 1
#endif
#if GGUF_TOGETHER
#define DECODE_ALONE 0
#else
#define DECODE_ALONE 1
#endif
#define DECODE_LOOP 0
#define DECODE_COLUMNS 16
#ifndef DECODE_FLIGHT
#define DECODE_FLIGHT 4
#endif
#ifndef DECODE_NORM
#define DECODE_NORM 0
#endif
#ifndef GGUF_CLUSTER
#define GGUF_CLUSTER 1
#endif
#ifndef GGUF_PARTS  // without clusters, blocks that divide the splits of each group of columns
#define GGUF_PARTS 1
#endif
#ifndef GGUF_HELD  // 1: registers hold x, with GGUF_TOGETHER, one term and no norm
#define GGUF_HELD 0
#endif
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/cluster.cuh"
#include "lib/gate.cuh"
#include "lib/overlap.cuh"
#include "lib/decode/mma_gguf.cuh"
#include "lib/decode/epilogues.cuh"
#if GGUF_HELD
#include "lib/decode/mma_held.cuh"
#elif !GGUF_TOGETHER && GGUF_CLUSTER == 1 && DECODE_OPERAND
#include "lib/decode/mma_copied.cuh"
#elif !GGUF_TOGETHER && GGUF_CLUSTER == 1
#include "lib/decode/mma_staged.cuh"
#endif
#include "lib/decode/gguf_outputs.cuh"

#if GGUF_CLUSTER == 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

struct Side : Whole {
#if GGUF_HELD
    typedef Held Rows;
    static constexpr int AT_A_TIME = UNITS;  // units per iteration: the index of a register is constant
#elif !GGUF_TOGETHER && GGUF_CLUSTER == 1 && DECODE_OPERAND
    typedef Copied Rows;
    static constexpr int AT_A_TIME = UNROLLED;
#elif !GGUF_TOGETHER && GGUF_CLUSTER == 1
    typedef Staged Rows;
    static constexpr int AT_A_TIME = 1;
#else
    static constexpr int AT_A_TIME = UNROLLED;
#endif
};

// Shared memory after the rows of x: the sums of two groups of ACROSS columns (the current and the previous group), and
// the ring buffers of the warps.
struct Shared {
    static constexpr int PLANE = PLANES / 2 * DECODE_ROWS * PLANE_PITCH;
    template <int RANGE>
    static constexpr int SLOT_OF = Blocks<gguf::OfRange<RANGE>>::SLOT;
#if !GGUF_TOGETHER && GGUF_CLUSTER == 1
    static constexpr int ROWS = Side::Rows::BYTES;
#else
    static constexpr int ROWS = GGUF_HELD ? 0 : Input::BYTES;
#endif
    static constexpr int FIRST = SLOT_OF<0>, SECOND = SLOT_OF<1>, THIRD = SLOT_OF<2>;
    static constexpr int MAX = FIRST > SECOND ? FIRST : SECOND, SLOT = MAX > THIRD ? MAX : THIRD;

    // Returns the plane of sums for group `turn` of columns, and below the ring of a warp; both follow the rows of x.
    __device__ __forceinline__ static float* plane(const Input& input, int turn) {
        return reinterpret_cast<float*>(input.shared + ROWS) + turn % 2 * PLANE;
    }

    __device__ __forceinline__ static char* ring(const Input& input, int warp) {
        return input.shared + (ROWS + 2 * 4 * PLANE + 15) / 16 * 16 + warp * DECODE_FLIGHT * SLOT;
    }
};

struct Turn {  // count: groups of columns done; start: first column of the last group
    int count, start;
};

#if GGUF_TOGETHER
template <int RANGE, typename End, typename Rows>
__device__ __forceinline__ void multiply(const Weighted& of, Input& input, Rows& rows, const End& end, Turn last) {
    constexpr int OUTPUTS = DECODE_ROWS * ACROSS;
    constexpr bool AT_ONCE = OUTPUTS <= THREADS;
    const Range<RANGE> range(blockIdx.x, gridDim.x, of.N);
    const int warp = threadIdx.x / 32;  // also the index of the split (range of K) that the warp multiplies
    typedef Blocks<gguf::OfRange<RANGE>, Side> Of;
    const Of blocks(of.w, of.up, Shared::ring(input, warp), of.N);
    Stream<Of, UNITS> stream(blocks, warp * UNITS, range.first, range.step, range.end);
    if (RANGE == 0) {
        input.prefetch();
        let_next_start();
        wait_for_previous();
#if GGUF_HELD
        rows.bring(input, warp);
#else
        input.bring();
#endif
    }
#pragma unroll 1
    for (int start = range.first; start < range.end; start += range.step) {
        const auto load = [&](Output<End>& to, int i) {
            to.load(of, end, input.first + i / ACROSS, input.M, start, i % ACROSS);
        };
        Output<End> output;
        if (AT_ONCE && threadIdx.x < OUTPUTS) load(output, threadIdx.x);  // overlaps with the products
        Sums sums = {};
#pragma unroll Side::AT_A_TIME
        for (int unit = 0; unit < UNITS; ++unit) stream.use(warp, unit, rows, sums);
        Totals of_split = {};
        sums.add_to(of_split);
        // Other warps may still read the sums of the previous group of columns. No warp still reads the sums of the
        // group before it, whose memory is reused here.
        float* const totals = Shared::plane(input, last.count);
        last.count += 1;
        each(of_split, [&](int column, int row, float sum) {
            totals[warp * OUTPUTS + row * DECODE_COLUMNS + column] = sum;
        });
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < OUTPUTS; i += THREADS) {
            const int row = i / ACROSS;
            if (!AT_ONCE) load(output, i);
            output.finish(end, [&](int at) {
                float halves[2] = {};
#pragma unroll
                for (int s = 0; s < SPLITS; ++s) {
                    halves[s / order::HALF_SPLITS] += totals[s * OUTPUTS + row * ACROSS + at];
                }
                return halves[0] + halves[1];
            });
        }
    }
    if constexpr (!Range<RANGE>::LAST) multiply<RANGE + 1>(of, input, rows, end, last);
}
#elif GGUF_CLUSTER == 1
template <int RANGE, typename End>
__device__ __forceinline__ void multiply(const Weighted& of, Side::Rows& rows, const End& end, const Parts& parts) {
    constexpr int EACH = SPLITS / GGUF_PARTS;  // splits of a block
    static_assert(EACH * GGUF_PARTS == SPLITS && !(GGUF_PARTS > 1 && DECODE_UP), "blocks have equally many splits");
    const Range<RANGE> range(blockIdx.x / GGUF_PARTS, gridDim.x / GGUF_PARTS, of.N);
    const int own = threadIdx.x / 32 * DECODE_COLUMNS, first = blockIdx.x % GGUF_PARTS * EACH;
    typedef Blocks<gguf::OfRange<RANGE>, Side> Of;
    const Of blocks(of.w, of.up, Shared::ring(rows.input, threadIdx.x / 32), of.N);
    Stream<Of, EACH * UNITS> stream(blocks, first * UNITS, range.first + own, range.step, range.end);
    if (RANGE == 0) {
        let_next_start();
        wait_for_previous();
    }
#pragma unroll 1
    for (int start = range.first; start < range.end; start += range.step) {
        const auto add_split = [&](int split, Totals& to) {
            Sums sums = {};
#pragma unroll Side::AT_A_TIME
            for (int unit = 0; unit < UNITS; ++unit) {
                rows.use(split * UNITS + unit, [&] {
                    if (start + own < range.end) stream.use(split, unit, rows, sums);
                    else end_group();
                });
            }
            sums.add_to(to);
        };
        rows.begin(first * UNITS, (first + EACH) * UNITS);
        if constexpr (GGUF_PARTS > 1) {
            // A block with half of the splits adds them up. Otherwise each split has its own sums in memory.
            constexpr int ADDED = EACH == order::HALF_SPLITS ? EACH : 1, COUNT = SPLITS / ADDED;
#pragma unroll 1
            for (int next = first; next < first + EACH; next += ADDED) {
                Totals totals = {};
#pragma unroll 1
                for (int split = next; split < next + ADDED; ++split) add_split(split, totals);
                each(totals, [&](int column, int row, float sum) {
                    const int m = rows.input.first + row, n = start + own + column;
                    if (m < parts.M && n < parts.N) __stcg(parts.at(next / ADDED, m, n), sum);
                });
            }
            if (!parts.complete(start / ACROSS)) continue;
            finish(of, rows.input, end, start, [&](int row, int at) {
                float halves[2] = {};
#pragma unroll
                for (int s = 0; s < COUNT; ++s) {
                    halves[s * ADDED / order::HALF_SPLITS] += __ldcg(parts.at(s, rows.input.first + row, start + at));
                }
                return halves[0] + halves[1];
            });
        } else {
            static_assert(4 * DECODE_ROWS * PLANE_PITCH <= Side::Rows::BYTES, "sums replace the rows of x");
            Totals halves[2];  // in local memory
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                Totals of_half = {};
                const int end_of_half = min(SPLITS, (half + 1) * order::HALF_SPLITS);
#pragma unroll 1
                for (int split = half * order::HALF_SPLITS; split < end_of_half; ++split) add_split(split, of_half);
                memcpy(halves[half], of_half, sizeof(Totals));
            }
            add(halves[0], halves[1]);
            float* const plane = reinterpret_cast<float*>(rows.input.shared);  // replaces the rows of x
            __syncthreads();
            each(halves[0], [&](int column, int row, float sum) { plane[row * PLANE_PITCH + own + column] = sum; });
            __syncthreads();
            finish(of, rows.input, end, start, [&](int row, int at) { return plane[row * PLANE_PITCH + at]; });
        }
    }
    if constexpr (!Range<RANGE>::LAST) multiply<RANGE + 1>(of, rows, end, parts);
}
#else
// Waits until all blocks of the cluster have released their sums of the previous group of columns, and adds these sums.
template <typename End>
__device__ __forceinline__ void add_last(const Weighted& of, const Input& input, const End& end, const Turn& last) {
    if (last.count == 0) return;
    acquire_from_cluster();
    add_splits(of, Shared::plane(input, last.count - 1), input, end, last.start);
}

template <int RANGE, typename End>
__device__ __forceinline__ void multiply(const Weighted& of, Input& input, const End& end, Turn last) {
    const Range<RANGE> range(blockIdx.x / GGUF_CLUSTER, gridDim.x / GGUF_CLUSTER, of.N);
    const int warp = threadIdx.x / 32, own = warp * DECODE_COLUMNS, rank = blockIdx.x % GGUF_CLUSTER;
    typedef Blocks<gguf::OfRange<RANGE>> Of;
    const Of blocks(of.w, of.up, Shared::ring(input, warp), of.N);
    Stream<Of, UNITS> stream(blocks, rank * UNITS, range.first + own, range.step, range.end);
    if (RANGE == 0) {
        let_next_start();
        wait_for_previous();
        input.bring_split(rank);
        __syncthreads();
    }
#pragma unroll 1
    for (int start = range.first; start < range.end; start += range.step) {
        Sums sums = {};
#pragma unroll 1
        for (int unit = 0; start + own < range.end && unit < UNITS; ++unit) stream.use(rank, unit, input, sums);
        Totals totals = {};
        sums.add_to(totals);
        add_last(of, input, end, last);
        float* const plane = Shared::plane(input, last.count);
        each(totals, [&](int column, int row, float sum) { plane[row * PLANE_PITCH + own + column] = sum; });
        release_to_cluster();
        last.count += 1, last.start = start;
    }
    if constexpr (Range<RANGE>::LAST) {
        add_last(of, input, end, last);
        sync_cluster();  // the other blocks have read this block's sums
    } else {
        multiply<RANGE + 1>(of, input, end, last);
    }
}
#endif

template <typename End>
__device__ __forceinline__ void run(const float* x, const float* gamma, const float* beta, float eps, int M,
                                    const Weighted& of, const End& end, const float* sums = nullptr,
                                    float* workspace = nullptr) {
    extern __shared__ float4 shared[];
    char* const rows = reinterpret_cast<char*>(shared);
    const int first = DECODE_EXPERTS ? 0 : (int)blockIdx.y * DECODE_ROWS;
    Input input{x, gamma, beta, eps, M, first, rows, 1.0f, sums, nullptr, {}};
#if GGUF_HELD
    Held held;
    multiply<0>(of, input, held, end, Turn{0, 0});
#elif GGUF_TOGETHER
    multiply<0>(of, input, input, end, Turn{0, 0});
#elif GGUF_CLUSTER == 1
#if DECODE_OPERAND
    Copied rows_of_x(input, sums);
#else
    Staged rows_of_x(input);
#endif
    multiply<0>(of, rows_of_x, end, Parts(workspace, M, of.N));
#else
    multiply<0>(of, input, end, Turn{0, 0});
#endif
}

// Launched by operation (variant): linear (gguf), linear_qkv (qkv_gguf), linear_rope (rope_gguf),
// linear_sums (linear_sums_gguf), rope_sums (rope_sums_gguf)
extern "C" __global__ void __cluster_dims__(GGUF_CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma_gguf(
    const float* x,                   // (M, K); with DECODE_OPERAND its 16-bit terms (lib/decode/mma_copied.cuh)
    const float* __restrict__ gamma,  // (K), with DECODE_NORM
    const float* __restrict__ beta,   // (K), with DECODE_NORM 1
    const W* __restrict__ w,          // (N, K), GGUF blocks
    const W* __restrict__ up,         // (N, K), GGUF blocks, with DECODE_UP
    const float* __restrict__ bias,   // (N) or null
    const float* sums,                // (DECODE_SUMS, M, N); with EPILOGUE_APPEND_ROPE (DECODE_SUMS, M, K), to add to x
                                      // with DECODE_OPERAND: sums of chunks of x
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N), also as an operand with sums; with a KV cache only q
    const float* rotations,           // (M, DECODE_ROPE / 2, 2), with DECODE_ROPE
    const int* row,                   // (M)
    const int* position,              // (M)
    KV* k_cache,                      // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    KV* v_cache,                      // (B, n_ctx, C), or (B, n_ctx, n_kv_head DECODE_ROPE)
    float eps, int M, int N, int gelu, int C, int n_head, int n_kv_head, int B, int n_ctx,
    const long long* own, long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5,
    long long* to_6, long long* to_7, int first_column, int all_columns, int capacity) {  // EPILOGUE_PEERS: Peers
#if EPILOGUE == EPILOGUE_ADD_SUMS
    const AddSums<DECODE_SUMS> end{residual, sums, nullptr, out, M, N};
    run(x, nullptr, nullptr, 0.0f, M, {w, nullptr, nullptr, N}, end);
#elif EPILOGUE == EPILOGUE_APPEND_ROPE
    const AppendRope<DECODE_ROPE> end{rotations, out, k_cache, v_cache, row, position,
                                  n_head, n_kv_head, B, n_ctx, nullptr, nullptr, 0.0f};
    run(x, gamma, nullptr, eps, M, {w, nullptr, bias, N}, end, sums);
#elif EPILOGUE == EPILOGUE_APPEND
    const Append end{out, k_cache, v_cache, row, position, C, B, n_ctx};
    run(x, gamma, beta, eps, M, {w, nullptr, bias, N}, end, sums);
#elif EPILOGUE == EPILOGUE_PEERS
    const Peers peers{own, {to_1, to_2, to_3, to_4, to_5, to_6, to_7}, first_column, all_columns, capacity};
    run(x, gamma, beta, eps, M, {w, up, bias, N}, ToPeers(out, N, gelu, peers), sums);
#else
    run(x, gamma, beta, eps, M, {w, up, bias, N}, Add{residual, out, N, gelu}, sums);
#endif
}

// Launched by operation (variant): linear (gguf)
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma_gguf_parts(
    const float* x,                  // (M, K); with DECODE_OPERAND its 16-bit terms
    const W* __restrict__ w,         // (N, K), GGUF blocks
    const float* __restrict__ bias,  // (N) or null
    const float* residual,           // (M, N) or null; may be out
    float* out,                      // (M, N)
    const float* sums,               // with DECODE_OPERAND: sums of chunks of x
    float* workspace,                // 1,024 counters, which are 0 before and after a launch; then planes of sums
    int M, int N, int gelu) {
#if GGUF_PARTS > 1
    run(x, nullptr, nullptr, 0.0f, M, {w, nullptr, bias, N}, Add{residual, out, N, gelu}, sums, workspace);
#endif
}

// Launched by operation (variant): experts_gated (experts gated gguf), experts_down (experts down gguf)
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma_gguf_experts(
    const float* x, const int* tiles,  // (M, K), or with DECODE_EXPERTS 1 (P, K); (T, 1 + places)
    const W* __restrict__ w, const W* __restrict__ up,  // (E N, K), GGUF blocks of one type; N is a multiple of 16
    float* out, int N, int T, int places) {             // (P, N)
#if DECODE_EXPERTS
    let_next_start(), wait_for_previous();  // for the kernel that writes the tiles
    const int own = blockIdx.y + gridDim.y * blockIdx.z;
    const ExpertShare<DECODE_ROWS> share(tiles + (long long)(own % T) * (1 + places), own / T * DECODE_ROWS, places);
    if (share.count == 0) return;
    const long long first = (long long)share.expert * (N / 8) * gguf::OfRange<0>::Of::row_bytes(DECODE_K);
    const Weighted of{w + first, up + (DECODE_UP ? first : 0), nullptr, N};
    run(x, nullptr, nullptr, 0.0f, share.count, of, ToChoices{out, N});
#endif
}
