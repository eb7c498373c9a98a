// architecture: sm_90
// matmul/decode/ffn_mma.cu for GGUF weights:
//
//   h = silu(RMSNorm(x) W^T) (RMSNorm(x) U^T)           W, U (H, C), V (C, H)
//   sums[s] = sum over split s (a range of the H channels) of h V^T
//
//   decode_ffn_mma_gguf: RMSNorm and a gated feed-forward of up to 4 rows with GGUF weights, by clusters whose blocks
//       exchange h
//
// Results have the same bits as decode_mma_gguf with W and U followed by decode_mma_gguf with V, because all these
// kernels use the products of lib/decode/mma_gguf.cuh. The next kernels add the sums over the splits
// (lib/split_sums.cuh).
//
//   cluster s     h[s]     block 0 | block 1 | ...     OWN columns each, from all of x; sent to all blocks as floats
//                 sums[s]  tiles of 16 outputs: warp 0 of block 0, of block 1, ..., warp 1 of block 0, ...
//
//   a warp        first product: one split of C, for the block's columns of h, in tiles of eight rows of W and of U;
//                 second product: tiles of 16 outputs
//
// A block requests all its weights of W, U and V before the wait for the previous kernel, and keeps them in shared
// memory. The next kernel may start only once x has been loaded. A multiprocessor runs one block, or two blocks if
// there is one row, because the 16 blocks of a cluster need space on neighbouring multiprocessors. Without this
// limit, a step of SmolLM2 with 2 or 4 rows is slower than with separate kernels.
//
// Measured: docs/experiments.md#decode_ffn_mma
//
// Grid (FF_CLUSTER * splits of H), block (THREADS), dynamic shared memory BYTES. A cluster of more than 8 blocks must
// be allowed by cuFuncSetAttribute (non-portable cluster size).
#define WEIGHT_GGUF 1
#define DECODE_NORM 2
#define DECODE_UP 1
#define DECODE_COLUMNS 16
#define DECODE_FLIGHT 2
#include "lib/storage.cuh"
#include "lib/gate.cuh"
#include "lib/sm80.cuh"
#include "lib/overlap.cuh"
#include "lib/decode/ffn.cuh"
#include "lib/decode/mma_gguf.cuh"

#ifndef FF_TYPE  // GGUF type of V; W and U have GGUF_TYPE_0
#define FF_TYPE GGUF_TYPE_0
#endif

constexpr int H_UNITS = order::split_units(FF_H);
constexpr int OF_H = OWN / 8;                // tiles of W and U, per block
constexpr int OUT_TILES = (DECODE_K + 15) / 16;  // tiles of V
constexpr int OUT_OF_WARP = (OUT_TILES + WARPS * FF_CLUSTER - 1) / (WARPS * FF_CLUSTER);
static_assert(UNITS == 1, "a warp has a unit of C");

// Operand h of the second product, h V^T: rows of h[s] in shared memory, stored as 16-bit terms and chunk sums.
struct Hidden {
    static constexpr int TERMS_OF_SPLIT = order::TERMS * (2 * H_LENGTH + PADDING);
    static constexpr int PITCH = (TERMS_OF_SPLIT + order::TERMS * 16 * H_UNITS + 127) / 128 * 128 + PADDING;
    char* rows;

    // Returns the places of row r's terms and chunk sums.
    __device__ __forceinline__ BlockOperand<H_UNITS> blocks(int r) const {
        return {rows + r * PITCH, rows + r * PITCH + TERMS_OF_SPLIT};
    }

    // Loads the lane's values of a chunk, of unit `unit` of the split, for the rows of tile i.
    __device__ __forceinline__ void get(order::Rows& to, int i, int, int unit, int chunk) const {
        const int k = unit * order::UNIT + chunk * order::CHUNK + threadIdx.x % 4 * order::WIDTH;
        to.load(rows + Input::row_of(i) * PITCH + 2 * k, 2 * H_LENGTH + PADDING);
    }

    // Returns the sum over chunk t of a unit, for the row and term that lane 4 g + t holds in tile i.
    __device__ __forceinline__ unsigned chunk_sums(int i, int, int unit) const {
        return blocks(Input::row_of(i)).own_sum(unit);
    }
};

// The second product as a side of Blocks (see Whole in lib/decode/mma_gguf.cuh): x is h[s], w is V.
struct OfHidden {
    static constexpr int K = FF_H, UNITS = H_UNITS;
    static constexpr bool UP = false;
    typedef Hidden Rows;

    __device__ __forceinline__ static int row(int column, int N) { return min(column, N - 1); }
};

// The range of outputs of V (see lib/gguf_ranges.cuh): one GGUF type for all rows.
struct OfV {
    typedef gguf::Part<FF_TYPE> Of;
    static constexpr int FROM = 0;

    __device__ __forceinline__ static int begin(int) { return 0; }
};

typedef Blocks<gguf::OfRange<0>> First;
typedef Blocks<OfV, OfHidden> Second;

// The layout of shared memory.
constexpr int RECEIVED = aligned16(Input::BYTES);            // (DECODE_ROWS, H_LENGTH) floats: h[s], from all blocks
constexpr int HIDDEN = RECEIVED + DECODE_ROWS * 4 * H_LENGTH;  // h[s] as terms (lib/operands.cuh)
constexpr int STAGED = HIDDEN + DECODE_ROWS * Hidden::PITCH;  // (DECODE_ROWS, OWN) floats: this block's h
constexpr int TOTALS = STAGED + DECODE_ROWS * 4 * OWN;       // (SPLITS, DECODE_ROWS, OF_H, 16) floats: split sums
constexpr int ARRIVED = TOTALS + SPLITS * DECODE_ROWS * OWN * 8; // 8 bytes for a Barrier
constexpr int WEIGHTS = aligned16(ARRIVED + 8);              // OF_WARP bytes for each warp
constexpr int OF_WARP = OF_H * First::SLOT + OUT_OF_WARP * H_UNITS * Second::SLOT;
constexpr int BYTES = WEIGHTS + WARPS * OF_WARP;
static_assert(BYTES <= 227 * 1024, "a block has room");
static_assert(HIDDEN % 16 == 0 && STAGED % 16 == 0 && ARRIVED % 8 == 0 && OF_WARP % 16 == 0, "alignment");

// Completes the block's columns of h for row r: one warp adds the sums over the splits of C and applies the gate.
__device__ __forceinline__ void complete_row(char* shared, int r) {
    const float* const totals = reinterpret_cast<const float*>(shared + TOTALS) + r * 2 * OWN;
#pragma unroll
    for (int column = threadIdx.x % 32; column < OWN; column += 32) {
        float v[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float halves[2] = {};
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) {
                const int at = s * DECODE_ROWS * 2 * OWN + column / 8 * 16 + 8 * m + column % 8;
                halves[s / order::HALF_SPLITS] += totals[at];
            }
            v[m] = halves[0] + halves[1];
        }
        const float gate = order::finished(v[0], 1.0f, 1.0f, 0.0f);
        reinterpret_cast<float*>(shared + STAGED)[r * OWN + column] = gate_of(gate) * v[1];
    }
    __syncwarp();
}

// Launched by operation (variant): gated_sums (gated_sums_gguf)
extern "C" __global__ void __cluster_dims__(FF_CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_ffn_mma_gguf(
    const float* x,                   // (M, C), M up to DECODE_ROWS
    const float* __restrict__ gamma,  // (C)
    const W* __restrict__ w,          // (H, C), GGUF blocks
    const W* __restrict__ up,         // (H, C), GGUF blocks
    const W* __restrict__ v,          // (C, H), GGUF blocks
    float* sums,                      // (splits of H, M, C)
    float eps, int M) {
    extern __shared__ float4 memory[];
    char* const shared = reinterpret_cast<char*>(memory);
    open_cluster(shared + ARRIVED);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % FF_CLUSTER, h_split = blockIdx.x / FF_CLUSTER;
    const int own = h_split * H_LENGTH + rank * OWN;  // the block's first column of h

    char* const of_warp = shared + WEIGHTS + warp * OF_WARP;
    const First first(w, up, of_warp, FF_H);
#pragma unroll
    for (int tile = 0; tile < OF_H; ++tile) {
        typename First::Cursor from = first.cursor(2 * own + 16 * tile, warp);
        typename First::Started started;
        first.fetch(tile * First::SLOT, warp, First::unit_of_tile(warp, 0), from, started);
        end_copies(started);
    }
    end_group();
    const Second second(v, nullptr, of_warp + OF_H * First::SLOT, DECODE_K);
    const auto column = [&](int i) { return 16 * ((i * WARPS + warp) * FF_CLUSTER + rank); };
#pragma unroll
    for (int i = 0; i < OUT_OF_WARP; ++i) {
        typename Second::Cursor from = second.cursor(column(i), h_split * H_UNITS);
#pragma unroll
        for (int unit = 0; column(i) < DECODE_K && unit < H_UNITS; ++unit) {
            const int number = h_split * H_UNITS + unit;
            const int half = Second::unit_of_tile(number - unit, unit);
            typename Second::Started started;
            second.fetch((i * H_UNITS + unit) * Second::SLOT, number, half, from, started);
            end_copies(started);
        }
    }
    end_group();
    Input input{x, gamma, nullptr, eps, M, 0, shared, 1.0f, nullptr, nullptr, {}};
    input.prefetch();
    wait_for_previous();
    input.bring();
    let_next_start();

    wait_for_groups<1>();
    __syncwarp();
    float* const totals = reinterpret_cast<float*>(shared + TOTALS) + warp * DECODE_ROWS * 2 * OWN;
#pragma unroll 1
    for (int tile = 0; tile < OF_H; ++tile) {
        Sums of_split = {};
        typename First::Found found = {};
        first.use(tile * First::SLOT, warp, 0, input, of_split, found);
        Totals total = {};
        of_split.add_to(total);
        each(total, [&](int c, int row, float sum) { totals[row * 2 * OWN + tile * 16 + c] = sum; });
    }
    const auto complete = [&](int r) { complete_row(shared, r); };
    exchange_hidden(shared + STAGED, shared + ARRIVED, complete, [&](int r, int i) {
        return shared + RECEIVED + 4 * (r * H_LENGTH + rank * OWN) + 16 * i;
    });
    const Hidden hidden{shared + HIDDEN};
#pragma unroll 1
    for (int i = warp; i < DECODE_ROWS * H_UNITS; i += WARPS) {
        const int r = i / H_UNITS, unit = i % H_UNITS;
        const float4 four = reinterpret_cast<const float4*>(shared + RECEIVED)[(r * H_UNITS + unit) * 32 + lane];
        const float values[4] = {four.x, four.y, four.z, four.w};
        uint2 high, low;
        split_four(values, 1.0f, high, low);
        hidden.blocks(r).store(high, unit, 0);
        if (order::TERMS == 2) hidden.blocks(r).store(low, unit, 1);
    }
    __syncthreads();

    wait_for_groups<0>();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < OUT_OF_WARP; ++i) {
        if (column(i) >= DECODE_K) break;
        Sums of_split = {};
        typename Second::Found found = {};
#pragma unroll
        for (int unit = 0; unit < H_UNITS; ++unit) {
            second.use((i * H_UNITS + unit) * Second::SLOT, h_split, unit, hidden, of_split, found);
        }
        Totals total = {};
        of_split.add_to(total);
        each(total, [&](int c, int row, float sum) {
            const long long first = ((long long)h_split * M + row) * DECODE_K;
            if (row < M && column(i) + c < DECODE_K) sums[first + column(i) + c] = sum;
        });
    }
}
