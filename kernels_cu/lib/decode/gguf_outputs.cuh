// The outputs of matmul/decode/mma_gguf.cu: the columns of a block, the sums that several blocks have for them, and the
// epilogue. The including file defines GGUF_TOGETHER, GGUF_CLUSTER and GGUF_PARTS.
#pragma once
#include "lib/gate.cuh"
#include "lib/cluster.cuh"
#include "lib/decode/epilogues.cuh"
#include "lib/decode/mma_columns.cuh"

constexpr bool STAGED = !GGUF_TOGETHER && GGUF_CLUSTER == 1;  // whether shared memory holds one unit of x at a time
constexpr int ACROSS = GGUF_TOGETHER ? DECODE_COLUMNS : DECODE_COLUMNS * DECODE_WARPS;  // columns per block
constexpr int PLANE_PITCH = GGUF_TOGETHER ? ACROSS : ACROSS + 8;
constexpr int PLANES = GGUF_TOGETHER ? 2 * SPLITS : STAGED ? 0 : 2;  // (DECODE_ROWS, PLANE_PITCH) arrays of sums
constexpr int EACH = DECODE_UP ? 2 : 1;  // columns of w per output
static_assert(GGUF_CLUSTER == 1 || GGUF_CLUSTER == SPLITS, "a block has a split or all of them");
static_assert(EACH * GGUF_FROM_1 % ACROSS == 0 && EACH * GGUF_FROM_2 % ACROSS == 0, "a block has columns of one type");
static_assert(!DECODE_QK_NORM && !(DECODE_ALONE && DECODE_NORM), "other kernels have these");

struct Weighted {  // weights (N, K) and bias of a product
    const W* w;
    const W* up;
    const float* bias;  // (N) or null
    int N;
};

// The columns of a range (consecutive outputs with one GGUF type). A block computes the ACROSS columns from `first`
// on, then the ACROSS columns from `first` + `step` on, and so on up to `end`.
template <int RANGE>
struct Range {
    typedef gguf::OfRange<RANGE> OfRange;
    static constexpr int FROM = OfRange::FROM;
    static constexpr bool LAST = OfRange::LAST;
    int first, end, step;

    __device__ __forceinline__ Range(int block, int blocks, int N) {
        constexpr int BEGIN = EACH * FROM / ACROSS;
        first = (BEGIN + (block + blocks - BEGIN % blocks) % blocks) * ACROSS;
        end = EACH * (LAST ? N : OfRange::NEXT), step = blocks * ACROSS;
    }
};

// An output that a thread completes. at: column within the block's ACROSS columns. finish(end, total) stores the
// output; total(at) must return the sum of column `at`.
template <typename End>
struct Output {
    typename End::Late late;
    float bias, partner_bias;
    int m, n, at;
    bool there;

    // Loads the data that this output needs besides its sum.
    __device__ __forceinline__ void load(const Weighted& of, const End& end, int m_, int M, int start, int at_) {
        const Column column(start + at_, of.N);
        m = min(m_, M - 1), n = column.n, at = at_;
        there = m_ < M && column.there && !(DECODE_UP && at % PAIRED >= PAIRED / 2);
        if (there) late = end.late(m, n);
        bias = of.bias ? constant(of.bias + n) : 0.0f;
        if constexpr (End::ROTATES) partner_bias = of.bias ? constant(of.bias + end.partner(n)) : 0.0f;
    }

    // Stores the output, if it exists.
    template <typename Total>
    __device__ __forceinline__ void finish(const End& end, Total total) const {
        if (there) end.store(m, n, value(end, total), late);
    }

    // Returns the output: its sum with bias, RoPE with column `partner`, or the gate times up.
    template <typename Total>
    __device__ __forceinline__ float value(const End& end, Total total) const {
        const int partner = at % PAIRED < PAIRED / 2 ? at + PAIRED / 2 : at - PAIRED / 2;
        const float v = order::finished(total(at), 1.0f, 1.0f, bias);
        if constexpr (End::ROTATES) {
            const float other = order::finished(total(partner), 1.0f, 1.0f, partner_bias);
            return end.rotated(n, v, other, late);
        } else if constexpr (DECODE_UP) {
            return gate_of(v) * total(partner);
        } else {
            return end.value(v, late);
        }
    }
};

// Completes the outputs of the ACROSS columns from `start` on. total(row, at) must return the sum of column `at`.
// Neighbouring lanes have neighbouring outputs. With OPERAND_SUMS, a warp has the outputs of a chunk.
template <typename End, typename Total>
__device__ __forceinline__ void finish(const Weighted& of, const Input& input, const End& end, int start, Total total) {
    constexpr int OUTPUTS = ACROSS / EACH, HALF = DECODE_UP ? PAIRED / 2 : OUTPUTS;
    static_assert(!OPERAND_SUMS || OUTPUTS % 32 == 0, "a warp has whole chunks");
#pragma unroll 4
    for (int i = threadIdx.x; i < DECODE_ROWS * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, at = i % OUTPUTS / HALF * PAIRED + i % OUTPUTS % HALF;
        Output<End> output;
        output.load(of, end, input.first + row, input.M, start, at);
        const auto of_row = [&](int at) { return total(row, at); };
        if constexpr (DECODE_OUT_OPERAND) {
            const float term = term_of<FP16_TERMS>(output.there ? output.value(end, of_row) : 0.0f);
            const int m = output.m, n = output.n;
            if (output.there && n % 2 == 0) end.out[operand_place(m, n, input.M, of.N)] = term;
            if (OPERAND_SUMS && output.there) {
                store_sum_of_pairs(end.out, (unsigned)__float_as_int(term), m, n, input.M, of.N);
            }
        } else {
            output.finish(end, of_row);
        }
    }
    __syncthreads();
}

// The sums of the splits of all blocks in memory, with GGUF_PARTS: after COUNTERS counters, one plane (M, N) per split,
// or per half of the splits if each of two blocks adds up its four splits.
struct Parts {
    static constexpr int COUNTERS = 1024;
    float* planes;
    int M, N;

    __device__ __forceinline__ Parts(float* workspace, int M, int N) : planes(workspace + COUNTERS), M(M), N(N) {}

    // Returns the place of the sum of output (m, n) in a plane.
    __device__ __forceinline__ float* at(int plane, int m, int n) const {
        return planes + ((long long)plane * M + m) * N + n;
    }

    // Returns whether all blocks of the group of columns have stored their sums. The last block resets the counter.
    __device__ __forceinline__ bool complete(int group) const {
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            int* const counter = reinterpret_cast<int*>(planes) - COUNTERS + group * gridDim.y + blockIdx.y;
            last = atomicAdd(counter, 1) == GGUF_PARTS - 1;
            if (last) *counter = 0;
        }
        __syncthreads();
        __threadfence();
        return last;
    }
};

#if !GGUF_TOGETHER && GGUF_CLUSTER > 1
// Adds the sums of all blocks of a cluster, each of which has one split of K, and completes the outputs of every
// GGUF_CLUSTER-th row. A thread adds four neighbouring columns, and the four columns 8 later.
template <typename End>
__device__ __forceinline__ void add_splits(const Weighted& of, float* plane, const Input& input, const End& end,
                                           int start) {
    constexpr int FOURS = ACROSS / 8, OWN = (DECODE_ROWS + GGUF_CLUSTER - 1) / GGUF_CLUSTER * FOURS;
    const int rank = blockIdx.x % GGUF_CLUSTER;
#pragma unroll 1
    for (int i = threadIdx.x; i < OWN; i += THREADS) {
        const int row = i / FOURS * GGUF_CLUSTER + rank, at = i % FOURS / 2 * 16 + i % 2 * 4;
        if (row >= DECODE_ROWS) continue;
        float4 each[2][GGUF_CLUSTER];
#pragma unroll
        for (int s = 0; s < GGUF_CLUSTER; ++s) {
            const float* from = in_block_of_cluster(plane, s) + row * PLANE_PITCH + at;
            each[0][s] = *reinterpret_cast<const float4*>(from);
            each[1][s] = *reinterpret_cast<const float4*>(from + 8);
        }
        Output<End> outputs[2][4];
        float total[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                outputs[half][e].load(of, end, input.first + row, input.M, start, at + 8 * half + e);
            }
            float of_splits[2][4] = {};
#pragma unroll
            for (int s = 0; s < GGUF_CLUSTER; ++s) {
                const float4 v = each[half][s];
                float (&to)[4] = of_splits[s / order::HALF_SPLITS];
                to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) total[half][e] = of_splits[0][e] + of_splits[1][e];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                outputs[half][e].finish(end, [&](int of) { return total[of - at < 8 ? 0 : 1][e]; });
            }
        }
    }
}
#endif
