// architecture: sm_90
// The feed-forward part of a Llama layer in decoding:
//
//   h = silu(RMSNorm(x) W^T * scale) (RMSNorm(x) U^T * up_scale)           W, U (H, C), V (C, H)
//   sums[s] = sum over split s (a range of the H channels) of h V^T
//
//   decode_ffn_mma: RMSNorm and a gated feed-forward of up to 4 rows, by clusters whose blocks exchange h. One kernel
//       replaces five. This saves time because a decoding step of one row is a chain of kernels, each of which waits
//       for the previous one
//
// The additions are in the order of lib/decode/order.cuh, so a row has the same bits in any batch. A cluster computes
// one split of H: the columns of h in this split, which its blocks exchange, and the split's sums for all C outputs.
// The next kernels add these sums to x in order, when they load x (lib/split_sums.cuh).
//
//   cluster s     h[s]     block 0 | block 1 | ...     H_LENGTH / FF_CLUSTER columns each, from all of x
//                          each block sends its columns, as terms (lib/operands.cuh), to all blocks by st.async
//                 sums[s]   block 0 | block 1 | ...     C / FF_CLUSTER outputs each, from all of h[s]
//
//   a warp        first product: one split of C, for all of the block's columns of h; second product: some outputs
//
// All weights are requested before the wait for the previous kernel. W and U are kept in registers. With FF_COPIED, V
// is kept in shared memory, which leaves registers for other kernels; each lane copies the weights that it will
// multiply.
//
// Grid (FF_CLUSTER * splits of H), block (THREADS), dynamic shared memory BYTES. A cluster of more than 8 blocks must
// be allowed by cuFuncSetAttribute (non-portable cluster size).
#if !defined(STORAGE_FP16) && !defined(STORAGE_BF16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_FP16
#endif
#define DECODE_NORM 2
#include "lib/storage.cuh"
#include "lib/gate.cuh"
#include "lib/sm80.cuh"
#include "lib/decode/mma.cuh"
#include "lib/decode/epilogues.cuh"
#include "lib/decode/ffn.cuh"
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

#ifndef FF_COPIED  // whether V is loaded into shared memory instead of registers
#define FF_COPIED 1
#endif

constexpr int OWN_OUT = DECODE_K / FF_CLUSTER;  // columns of sums[s] per block
constexpr int MATRICES = 2;  // matrices of the first product: W and U
constexpr int OF_WARP = OWN / 8, OUT_OF_WARP = ((OWN_OUT + 7) / 8 + WARPS - 1) / WARPS;  // 8-column groups per warp
constexpr int H_CHUNKS = H_LENGTH / order::CHUNK;
constexpr int H_TERM = 2 * H_LENGTH + PADDING, H_PITCH = (2 * H_TERM + 127) / 128 * 128 + PADDING;
static_assert(!order::FLOATS, "of 16 bits or FP8");
static_assert(DECODE_K % FF_CLUSTER == 0, "blocks have as many outputs");

// The layout of shared memory.
constexpr int HIDDEN = aligned16(Input::BYTES);      // DECODE_ROWS rows of H_PITCH bytes: h[s] of all blocks
constexpr int STAGED = HIDDEN + DECODE_ROWS * H_PITCH;  // (DECODE_ROWS, 2, OWN): terms of this block's columns of h
constexpr int TOTALS = STAGED + DECODE_ROWS * 4 * OWN;  // (SPLITS, DECODE_ROWS, MATRICES, OWN) floats: split sums
constexpr int ARRIVED = TOTALS + SPLITS * DECODE_ROWS * MATRICES * OWN * 4;  // 8 bytes for a Barrier
constexpr int COPIED = aligned16(ARRIVED + 8);  // with FF_COPIED, OUT_OF_WARP * H_CHUNKS 16-byte vectors per thread
constexpr int BYTES = COPIED + FF_COPIED * OUT_OF_WARP * H_CHUNKS * THREADS * 16;
static_assert(BYTES <= 227 * 1024, "a block has room");
static_assert(ARRIVED % 8 == 0 && HIDDEN % 16 == 0 && STAGED % 16 == 0, "alignment");

// A lane's weights from a matrix (N, K): from ROW_GROUPS groups of eight columns (rows in memory), CHUNKS chunks along
// K of one column per group. They are kept in registers, or with IN_SHARED in shared memory.
template <int K, int CHUNKS, int ROW_GROUPS, bool IN_SHARED>
struct Panel {
    static constexpr int TILES = (ROW_GROUPS + 1) / 2;
    uint4* own;  // IN_SHARED: the thread's first vector; further vectors are THREADS vectors apart
    uint4 raw[IN_SHARED ? 1 : CHUNKS][2 * TILES];
    float sums[TILES][ROW_TILES][4];

    // Loads the lane's column of group `row_group`. column: address of the first value of the column for this warp.
    // there: whether the column exists. Weights of missing columns, and after `left` values, are zero.
    __device__ __forceinline__ void fetch(int row_group, const W* column, bool there, int left) {
        const int t = threadIdx.x % 4 * order::WIDTH;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const bool needed = there && (K % order::UNIT == 0 || chunk * order::CHUNK + t < left);
            const W* from = column + chunk * order::CHUNK + t;
            if constexpr (IN_SHARED) {
                copy16(own + (chunk * ROW_GROUPS + row_group) * THREADS, from, needed);
            } else {
                raw[chunk][row_group] = {};
                typedef Vec<W, order::WIDTH> Vector;
                if (needed) raw[chunk][row_group] = stream_in<Vector>(from).raw;
            }
        }
    }

    // Returns the lane's 16 bytes of chunk `chunk` of its column in group `row_group`.
    __device__ __forceinline__ uint4 get(int chunk, int row_group) const {
        if (row_group >= ROW_GROUPS) return {};
        return IN_SHARED ? own[(chunk * ROW_GROUPS + row_group) * THREADS] : raw[IN_SHARED ? 0 : chunk][row_group];
    }

    // Multiplies the weights by rows of the other operand. rows(x, i, chunk) must load the lane's values of row tile i
    // and chunk `chunk` into x.
    template <typename Get>
    __device__ __forceinline__ void multiply(Get rows) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[tile][r][i] = 0.0f;
            }
        }
        if (IN_SHARED) wait_for_groups<0>();  // no barrier: only this thread reads its copies
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            order::Rows x[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) rows(x[r], r, chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const order::Columns columns(get(chunk, 2 * tile), get(chunk, 2 * tile + 1));
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) order::add_chunk(sums[tile][r], columns, x[r]);
            }
        }
    }

    // Calls use(row group, row, sum) for each sum of the lane: for its column of group `row_group` and row `row`. The
    // sums for high and low terms of x are added.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const {
#pragma unroll
        for (int row_group = 0; row_group < ROW_GROUPS; ++row_group) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                const int row = order::TILE_ROWS * r + threadIdx.x % 4, i = row_group % 2 * 2;
                const float(&of)[4] = sums[row_group / 2][r];
                if (row < DECODE_ROWS) use(row_group, row, order::joined(of[i], of[i + 1]));
            }
        }
    }
};

typedef Panel<DECODE_K, UNITS * UNIT_CHUNKS, MATRICES * OF_WARP, false> First;
typedef Panel<FF_H, H_CHUNKS, OUT_OF_WARP, FF_COPIED> Second;
constexpr int LANES_OWN = (OWN + 31) / 32;  // columns of h that a lane completes per row

struct Ends {
    float scale[MATRICES][LANES_OWN];
};

// Completes the block's columns of h for row r: one warp adds the sums over splits of C, applies the gate, and stores
// terms.
__device__ __forceinline__ void complete_row(char* shared, int r, const Ends& ends) {
    const int lane = threadIdx.x % 32;
    const float* totals = reinterpret_cast<const float*>(shared + TOTALS);
#pragma unroll
    for (int i = 0; i < LANES_OWN; ++i) {
        const int column = i * 32 + lane;
        float v[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            float total = 0.0f;
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) {
                total += totals[((split * DECODE_ROWS + r) * MATRICES + m) * OWN + min(column, OWN - 1)];
            }
            v[m] = fmaf(total, ends.scale[m][i], 0.0f);
        }
        const float h = gate_of(v[0]) * v[1];
        const float term = term_of<order::KIND>(h);
        if (column < OWN) {
            char* to = shared + STAGED + r * 4 * OWN + column % 2 * 2 * OWN + column / 2 * 4;
            *reinterpret_cast<float*>(to) = term;
        }
    }
    __syncwarp();
}

// Launched by operation (variant): gated_sums (gated_sums)
extern "C" __global__ void __cluster_dims__(FF_CLUSTER, 1, 1) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_ffn_mma(
    const float* x,                       // (M, C), M up to DECODE_ROWS
    const float* __restrict__ gamma,      // (C)
    const W* __restrict__ w,              // (H, C)
    const float* __restrict__ scale,      // (H) or null
    const W* __restrict__ up,             // (H, C)
    const float* __restrict__ up_scale,   // (H) or null
    const W* __restrict__ v,              // (C, H)
    float* sums,                          // (splits of H, M, C)
    float eps, int M) {
    extern __shared__ float4 memory[];
    char* shared = reinterpret_cast<char*>(memory);
    open_cluster(shared + ARRIVED);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const int rank = blockIdx.x % FF_CLUSTER, h_split = blockIdx.x / FF_CLUSTER;
    const int own = h_split * H_LENGTH + rank * OWN;  // the block's first column of h

    First first = {};
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) {
#pragma unroll
        for (int row_group = 0; row_group < OF_WARP; ++row_group) {
            const long long n = own + 8 * row_group + g;
            const W* column = (m ? up : w) + n * DECODE_K + warp * LENGTH;
            first.fetch(m * OF_WARP + row_group, column, true, DECODE_K - warp * LENGTH);
        }
    }
    Second second = {};
    second.own = reinterpret_cast<uint4*>(shared + COPIED) + threadIdx.x;
#pragma unroll
    for (int row_group = 0; row_group < OUT_OF_WARP; ++row_group) {
        const int column = 8 * (warp * OUT_OF_WARP + row_group) + g;
        const W* from = v + (long long)(rank * OWN_OUT + column) * FF_H + h_split * H_LENGTH;
        second.fetch(row_group, from, column < OWN_OUT, H_LENGTH);
    }
    if (FF_COPIED) end_group();
    Ends ends;
    if (warp < DECODE_ROWS) {
#pragma unroll
        for (int i = 0; i < LANES_OWN; ++i) {
            const int n = own + min(i * 32 + lane, OWN - 1);
            ends.scale[0][i] = scale ? constant(scale + n) : 1.0f;
            ends.scale[1][i] = up_scale ? constant(up_scale + n) : 1.0f;
        }
    }
    Input input{x, gamma, nullptr, eps, M, 0, shared, 1.0f, nullptr, nullptr, {}};
    input.prefetch();
    let_next_start();
    wait_for_previous();
    input.bring();

    first.multiply([&](order::Rows& to, int i, int chunk) {
        input.get(to, i, warp * UNITS + chunk / UNIT_CHUNKS, chunk % UNIT_CHUNKS);
    });
    float* totals = reinterpret_cast<float*>(shared + TOTALS);
    first.each([&](int row_group, int row, float sum) {
        const int m = row_group / OF_WARP, column = 8 * (row_group % OF_WARP) + g;
        totals[((warp * DECODE_ROWS + row) * MATRICES + m) * OWN + column] = sum;
    });
    const auto complete = [&](int r) { complete_row(shared, r, ends); };
    exchange_hidden(shared + STAGED, shared + ARRIVED, complete, [&](int r, int i) {
        char* const row = shared + HIDDEN + r * H_PITCH + 2 * OWN * rank;  // high terms; the low terms follow
        return row + (i < OWN / 8 ? 16 * i : H_TERM + 16 * i - 2 * OWN);
    });

    second.multiply([&](order::Rows& to, int i, int chunk) {
        const int r = (order::TILE_ROWS * i + lane / 8) % DECODE_ROWS;
        const int k = chunk * order::CHUNK + lane % 4 * order::WIDTH;
        to.load(shared + HIDDEN + r * H_PITCH + 2 * k, H_TERM);
    });
    second.each([&](int row_group, int row, float sum) {
        const int column = 8 * (warp * OUT_OF_WARP + row_group) + g;
        if (column >= OWN_OUT || row >= M) return;
        sums[((long long)h_split * M + row) * DECODE_K + rank * OWN_OUT + column] = sum;
    });
}
