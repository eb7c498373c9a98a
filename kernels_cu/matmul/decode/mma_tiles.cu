// Matrix products of decoding on tensor cores, in the order of additions of lib/decode/order.cuh:
//
//   decode_mma_tiles: more rows on tensor cores, with the same bits as decode_mma: a block computes a tile, or the
//       blocks of a cluster divide its K.
//       out = [residual +] [gelu] (x W^T * scale + bias)
//   decode_mma_tiles (qkv_mma_tiles): stores q in an array, k and v in the KV cache. EPILOGUE is EPILOGUE_APPEND
//       (lib/decode/epilogues.cuh)
//   decode_mma_tiles_up: with DECODE_UP, for two matrices, out = silu(x W^T * scale) (x up^T * up_scale)
//
// x (M, K) is float, W (N, K) has any type. A block computes a tile of DECODE_ROWS rows by DECODE_COLUMNS columns of
// the output. With DECODE_CLUSTER > 1, the blocks of a cluster divide the K of one tile: at 64 rows, a product of GPT-2
// has so few tiles that otherwise only a third of the GPU would be busy, and each block would load three times as much.
//
//   all threads   [ copy first slices of w | wait for x | copy first slices of x | multiply slices | sums | epilogue ]
//
// A slice is DECODE_CHUNKS chunks along K (lib/decode/order.cuh). Shared memory holds DECODE_STAGES slices; while one
// slice is multiplied, the next slices are copied. Operand A of an mma is 8 rows of x with two terms each, operand B 8
// columns of w.
//
//   x   the thread that has copied 4 values of a row replaces them by their terms (lib/operands.cuh), which a lane
//       later loads at once. With DECODE_OPERAND, x already consists of terms. With float weights, lanes compute terms
//       in registers
//   w   a lane loads 16 bytes of a column, its operands of several mma steps; FP8 is converted in registers. The high
//       and low parts of a column of hi/lo weights are neighbours in shared memory
//
// At the end of each split (a range of K), its sums are written to shared memory, row by row. The epilogue stores whole
// rows:
//
//   DECODE_CLUSTER 1   the sums are added to the sums of the previous splits
//   DECODE_GROUPS  a group of warps divides the splits; the sums are added in order when all groups have ended
//   otherwise      sums of row r are sent to block r % DECODE_CLUSTER of the cluster. Its mbarrier counts the received
//                  bytes; when the sums of all splits have arrived, the block adds them in order
//
// Each group of 16 columns of w is permuted in shared memory, so that a lane's sums of a row are 4 neighbouring
// columns.
//
// Any M and N; the size of a row of W is a multiple of 16 bytes; arrays are aligned to 16 bytes.
//
// grid (DECODE_CLUSTER * ceil(M / DECODE_ROWS) * ceil(N / DECODE_COLUMNS)), block (32 * DECODE_WARPS_M *
// DECODE_WARPS_N). `shared_bytes` of gpt2block/ops/engines/linear_mma_tiles.py computes the dynamic shared memory.
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/overlap.cuh"
#include "lib/decode/order.cuh"

#if DECODE_CLUSTER > 1
#include "lib/sm90.cuh"
#else  // GPUs before sm_90 have no clusters: DECODE_CLUSTER is 1
#undef __cluster_dims__
#define __cluster_dims__(size)
#endif

#include "lib/gate.cuh"
#include "lib/decode/epilogues.cuh"
#include "matmul/decode/mma_tiles.cuh"

// The sums in shared memory: one plane (rows, columns) for the splits of K that the first group of warps adds up, and a
// plane for each other split. With a cluster, a plane for each split.
struct Total {
    float* planes;
    static constexpr int PLANE = OWN_ROWS * PITCH;

    static __device__ __forceinline__ int in_first(int splits) {  // number of splits in the first plane
        return DECODE_CLUSTER > 1 ? 1 : (splits + DECODE_GROUPS - 1) / DECODE_GROUPS;
    }

    static __device__ __forceinline__ int bytes(int splits) {  // bytes of shared memory, a multiple of 128
        const int planes = splits - in_first(splits) + 1;
        return (planes * OWN_ROWS * PITCH * (int)sizeof(float) + 127) / 128 * 128;
    }

    // Adds up the planes.
    template <int COUNT>
    __device__ __forceinline__ void get(float (&totals)[COUNT], const int (&at)[COUNT], int splits) const {
        const float* plane = planes;
#pragma unroll 1  // unrolled code would be longer, and most blocks run it only once
        for (int n = 0; n < splits - in_first(splits) + 1; ++n, plane += PLANE) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) totals[i] = n ? totals[i] + plane[at[i]] : plane[at[i]];
        }
    }

#if DECODE_CLUSTER > 1
    Barrier& arrived;

    // Called by all threads. The phase of `arrived` ends when the sums over all splits have arrived for this block's
    // `rows` rows.
    __device__ __forceinline__ Total(float* planes, Barrier& arrived, int rows, int splits)
        : planes(planes), arrived(arrived) {
        if (threadIdx.x == 0) {
            init(arrived, 1);
            fence_inits();
            arrive_and_expect(arrived, rows * splits * DECODE_COLUMNS * (int)sizeof(float));
        }
        __syncthreads();
        arrive_in_cluster();
    }

    __device__ __forceinline__ void open() const { wait_for_cluster(); }  // call it before add4()

    // Sends sums of split `split`, for row `row` and columns `column` to `column` + 3, to the block that adds them.
    __device__ __forceinline__ void add4(int split, int row, int column, float a, float b, float c, float d) const {
        store_at(row % DECODE_CLUSTER, planes + split * PLANE + row / DECODE_CLUSTER * PITCH + column, arrived, a, b,
                 c, d);
    }

    __device__ __forceinline__ void close() const { wait<true>(arrived, 0, "sums"); }
#else
    int in_first_plane;  // in_first(splits)

    __device__ __forceinline__ Total(float* planes, int splits) : planes(planes), in_first_plane(in_first(splits)) {}
    __device__ __forceinline__ void open() const {}

    // Adds sums of split `split` for row `row` and columns `column` to `column` + 3 to the plane of the split.
    __device__ __forceinline__ void add4(int split, int row, int column, float a, float b, float c, float d) const {
        const int plane = DECODE_GROUPS > 1 ? max(split - in_first_plane + 1, 0) : 0;
        float4* to = reinterpret_cast<float4*>(planes + plane * PLANE + row * PITCH + column);
        const bool first = plane > 0 || split == 0;
        const float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *to;
        *to = first ? make_float4(a, b, c, d) : make_float4(before.x + a, before.y + b, before.z + c, before.w + d);
    }

    __device__ __forceinline__ void close() const { __syncthreads(); }
#endif

    // Adds a warp's sums of a split: (8 TILES_M rows, 8 TILES_N columns) from (warp.row, warp.column) on, see Sums.
    __device__ __forceinline__ void add(int split, const Sums& sums, const Warp& warp, int rows) const {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
            const int row = warp.row + 8 * m + warp.g;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < TILES_N; n += 2) {
                const float(&left)[4] = sums[m][n], (&right)[4] = sums[m][n + 1];
                add4(split, row, warp.column + 8 * n + 4 * warp.t, order::joined(left[0], left[2]),
                     order::joined(left[1], left[3]), order::joined(right[0], right[2]),
                     order::joined(right[1], right[3]));
            }
        }
    }
};

// Stores the outputs. A warp stores whole rows. For the first rows, the data that the epilogue needs besides the sums
// is loaded before the sums have arrived.
template <typename End>
__device__ __forceinline__ void store(const Total& total, const Share& share, const float* scale, const float* up_scale,
                                      const float* bias, float x_scale, float out_scale, const End& end, int own,
                                      int splits, int N) {
    constexpr int OF_WARP = (OWN_ROWS + WARPS - 1) / WARPS, MAX = ACROSS < 8 ? 8 / ACROSS : 1;
    constexpr int AHEAD = OF_WARP < MAX ? OF_WARP : MAX;  // rows that a warp stores at a time
    const int lane = threadIdx.x % 32, left = N - share.column - lane;  // columns of out from the lane's first one on
    float scales[ACROSS], biases[ACROSS];
#pragma unroll
    for (int j = 0; j < ACROSS; ++j) {
        const int output = 32 * (j / (1 + DECODE_UP)), n = share.column + lane + output;
        const float* const of_matrix = DECODE_UP && j % 2 ? up_scale : scale;
        scales[j] = of_matrix && output < left ? constant(of_matrix + n) : 1.0f;
        biases[j] = bias && output < left ? constant(bias + n) : 0.0f;
    }
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < OWN_ROWS; first += AHEAD * WARPS) {
        typename End::Late late[AHEAD][OUTPUTS] = {};
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int slot = first + i * WARPS, m = share.row + share.rank + slot * DECODE_CLUSTER;
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                if (slot < own && 32 * j < left) late[i][j] = end.late(m, share.column + lane + 32 * j);
            }
        }
        if (first < WARPS) total.close();
        float v[AHEAD * ACROSS];
        int at[AHEAD * ACROSS];
#pragma unroll
        for (int i = 0; i < AHEAD * ACROSS; ++i) {
            at[i] = min(first + i / ACROSS * WARPS, OWN_ROWS - 1) * PITCH + lane + 32 * (i % ACROSS);
        }
        total.get(v, at, splits);
#pragma unroll
        for (int i = 0; i < AHEAD * ACROSS; ++i) {
            v[i] = order::finished(v[i], scales[i % ACROSS], x_scale, biases[i % ACROSS]);
        }
        if constexpr (!DECODE_UP) end.activate(v);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int slot = first + i * WARPS, m = share.row + share.rank + slot * DECODE_CLUSTER;
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                if (slot >= own) continue;
                const float* const sums = v + i * ACROSS + (1 + DECODE_UP) * j;
                float value = DECODE_UP ? gate_of(sums[0]) * sums[DECODE_UP] : end.added(sums[0], late[i][j]);
                if constexpr (DECODE_OUT_OPERAND) value = term_of<order::KIND>(value, inverse_of(out_scale));
                if (32 * j < left) end.store(m, share.column + lane + 32 * j, value, late[i][j]);
            }
        }
    }
    if (threadIdx.x / 32 >= OWN_ROWS) total.close();
}

template <typename End>
__device__ __forceinline__ void multiply_all(const float* x, const W* w, const float* scale, const float* bias,
                                             float x_scale, float out_scale, const End& end, int M, int N, int K,
                                             const W* up = nullptr, const float* up_scale = nullptr) {
    extern __shared__ __align__(128) char shared[];
    const Share share(M, N, K);
    CopiesOfX copies_of_x(x, share, M, K);
    CopiesOfW copies_of_w(w, up, share, N, K);
    const Warp warp;
    const int slices = share.slices(), rows = min(DECODE_ROWS, M - share.row), splits = order::splits(K);

    char* stages = shared + Total::bytes(splits) + group() * DECODE_STAGES * STAGE;
    const int early = min(DECODE_STAGES - 1, slices);
    for (int slice = 0; slice < early; ++slice) {
        copies_of_w.next(stages + slice * STAGE);
        end_copies(copies_of_w.started);
    }
    let_next_start();
#if DECODE_CLUSTER > 1
    __shared__ Barrier arrived;
    const int own = (rows - share.rank + DECODE_CLUSTER - 1) / DECODE_CLUSTER;  // rows that this block stores
    const Total total(reinterpret_cast<float*>(shared), arrived, own, splits);
#else
    const int own = rows;
    const Total total(reinterpret_cast<float*>(shared), splits);
#endif
    wait_for_previous();
    for (int slice = 0; slice < DECODE_STAGES - 1; ++slice) {
        if (slice < early) copies_of_x.next(stages + slice * STAGE);
        end_copies(copies_of_x.started);
        end_group();
    }
    total.open();

    const int each = order::split_length(K) / SLICE;  // slices per split
    char *stage = stages, *free = stages + (DECODE_STAGES - 1) * STAGE;
    for (int split = share.first, slice = 0; split < share.last; ++split) {
        Sums sums = {};
        for (const int end = min(slice + each, slices); slice < end; ++slice) {
            wait_for_groups<DECODE_STAGES - 2>();
            copies_of_x.convert(stage, inverse_of(x_scale));
            sync_group();
            if (slice + DECODE_STAGES - 1 < slices) copies_of_w.next(free), copies_of_x.next(free);
            end_group();
            multiply(sums, stage, warp);
            end_copies(copies_of_w.started), end_copies(copies_of_x.started);
            free = stage;
            stage = stage == stages + (DECODE_STAGES - 1) * STAGE ? stages : stage + STAGE;
        }
        total.add(split, sums, warp, rows);
    }

    store(total, share, scale, up_scale, bias, x_scale, out_scale, end, own, splits, N);
}

// Launched by operation (variant): linear (mma_tiles), linear_qkv (qkv_mma_tiles)
extern "C" __global__ void __cluster_dims__(DECODE_CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS) decode_mma_tiles(
    const float* x,                   // (M, K)
    const W* __restrict__ w,          // (N, K); hi/lo weights: (2, N, K)
    const float* __restrict__ scale,  // (N) or null
    const float* __restrict__ bias,   // (N) or null
    float x_scale,                    // scale of x, with hi/lo weights
    float out_scale,                  // scale of out's terms, with hi/lo weights
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N); with DECODE_OUT_OPERAND 16-bit terms; with EPILOGUE_APPEND q (M, C)
    const int* row,                   // (M), with EPILOGUE_APPEND
    const int* position,              // (M), with EPILOGUE_APPEND
    KV* k_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    KV* v_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    int M, int N, int K, int gelu, int C, int B, int n_ctx) {
#if EPILOGUE == EPILOGUE_APPEND
    const Append end{out, k_cache, v_cache, row, position, C, B, n_ctx};
    multiply_all(x, w, scale, bias, x_scale, 1.0f, end, M, N, K);
#else
    multiply_all(x, w, scale, bias, x_scale, out_scale, Add{residual, out, N, gelu}, M, N, K);
#endif
}

// Launched by operation (variant): linear (mma_tiles)
extern "C" __global__ void __cluster_dims__(DECODE_CLUSTER) __launch_bounds__(THREADS, DECODE_BLOCKS)
    decode_mma_tiles_up(const float* x,                      // (M, K)
                        const W* __restrict__ w,             // (N, K)
                        const float* __restrict__ scale,     // (N) or null
                        const W* __restrict__ up,            // (N, K)
                        const float* __restrict__ up_scale,  // (N) or null
                        float* out,                          // (M, N); with DECODE_OUT_OPERAND 16-bit terms
                        int M, int N, int K) {
#if DECODE_UP
    multiply_all(x, w, scale, nullptr, 1.0f, 1.0f, Add{nullptr, out, N, 0}, M, N, K, up, up_scale);
#endif
}
