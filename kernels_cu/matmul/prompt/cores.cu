// A linear layer: out = [residual +] [gelu]((x w^T) * scale + bias). Activations and sums are fp32; weights are fp32,
// fp16, bf16 or FP8 (lib/storage.cuh).
//
//   x (M, K)   w (N, K)   scale (N), bias (N), residual (M, N) or null, residual may be out   out (M, N)   any M, N, K
//
//   linear_tiles: many rows: tiles of outputs in registers, products added in the order of k; weights narrower than
//       fp32 are widened in shared memory
//
// A block computes a ROWS x COLUMNS tile of out, a thread SIDE x SPAN outputs of the tile (lib/matmul/registers.cuh).
// Differences from matmul_forward_kernel3 in learn/matmul/registers.cu:
//
//   - Every tile adds the products of an output in the order of k, one after the other. A row therefore has the same
//     bits for any number of rows, any position among the rows and any tile. So K is not divided among groups of warps.
//     Instead, small tiles have few outputs per thread, so that each scheduler of a multiprocessor has a warp.
//   - k is the inner dimension of both x and w. Both are transposed while they are copied to shared memory, float by
//     float.
//   - Narrow weights (fp16, bf16, FP8) are copied unconverted, 8 at a time, to a separate buffer in shared memory. The
//     thread that copied them converts them to float for the next slice before it multiplies the current slice. This
//     needs no registers during the multiplication, and no barrier.
//   - scale, bias, GELU and residual are applied to the sums in registers.
//
// Concurrent blocks process neighbouring tiles, in bands of BAND rows of tiles. For rows or columns after the last one,
// threads read the last row or column again and store nothing. If DEPTH does not divide K, the first slice is padded
// with leading zeros, which do not change the sums. x is loaded through the L1 cache, so a launch must not overlap the
// previous kernel (lib/overlap.cuh).
//
//   slice s        wait for x(s), narrow w(s + 1); barrier; request x(s + STAGES - 1), narrow w(s + STAGES);
//                  widen w(s + 1); multiply x(s), w(s)
//
// Block (32 * ROWS / (8 SIDE) * COLUMNS / (4 SPAN)), grid (ceil(M / ROWS) * ceil(N / COLUMNS)), dynamic shared memory:
// STAGES * DEPTH * (4 * (ROWS + 4 + COLUMNS + 4) + COLUMNS * bytes of a narrow weight) bytes. LT_LOAD: narrow weights
// per copy, a power of two that divides K; w is aligned to a copy. LT_STORE 4: 16-byte stores, for N a multiple of 4,
// out and residual aligned to 16 bytes; otherwise LT_STORE 1.
#include "lib/storage.cuh"

#include "lib/gelu.cuh"
#include "lib/matmul/registers.cuh"

#ifndef LT_ROWS
#define LT_ROWS 128
#endif
#ifndef LT_COLUMNS
#define LT_COLUMNS 128
#endif
#ifndef LT_SIDE
#define LT_SIDE 8
#endif
#ifndef LT_SPAN
#define LT_SPAN 8
#endif
#ifndef LT_DEPTH
#define LT_DEPTH 16
#endif
#ifndef LT_STAGES
#define LT_STAGES 2
#endif
#ifndef LT_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define LT_BLOCKS 2
#endif
#ifndef LT_LOAD
#define LT_LOAD 8
#endif
#ifndef LT_STORE
#define LT_STORE 4
#endif
#ifndef LT_GELU
#define LT_GELU 0
#endif

constexpr int ROWS = LT_ROWS, COLUMNS = LT_COLUMNS, SIDE = LT_SIDE, SPAN = LT_SPAN, DEPTH = LT_DEPTH;
constexpr int STAGES = LT_STAGES, STORE = LT_STORE;
constexpr bool NARROW = sizeof(W) < 4;
constexpr int LOAD = NARROW ? LT_LOAD : 1;
constexpr int BAND = 16;  // rows of tiles per band; blocks process band after band
constexpr int WARP_ROWS = 8 * SIDE, WARP_COLUMNS = 4 * SPAN, WARPS_ACROSS = COLUMNS / WARP_COLUMNS;
constexpr int THREADS = 32 * (ROWS / WARP_ROWS) * WARPS_ACROSS;
constexpr int FOURS = SPAN / 4;                                    // groups of four columns per thread
constexpr int X_STRIDE = ROWS + 4, W_STRIDE = COLUMNS + 4;         // floats between successive k in shared memory
constexpr int RAW = NARROW ? DEPTH * COLUMNS * sizeof(W) / 4 : 0;  // size of a slice's narrow weights in floats
constexpr int RAW_AT = DEPTH * (X_STRIDE + W_STRIDE);
constexpr int STAGE = RAW_AT + RAW;

static_assert(ROWS % WARP_ROWS == 0 && COLUMNS % WARP_COLUMNS == 0, "a tile is made of whole warps");
static_assert(DEPTH % 8 == 0 && COLUMNS % 16 == 0, "8 lanes copy neighbours along k, and narrow weights of 16 columns");
static_assert(DEPTH % (2 * LOAD) == 0 && (LOAD & (LOAD - 1)) == 0, "2 lanes copy neighbours along k");
static_assert(SIDE == 2 || SIDE % 4 == 0, "rows come by four");
static_assert(STAGES >= 2, "one buffer is read while another one is filled");

// Copies slices of `count` rows of x or float w to shared memory, transposed from (count, K) to [DEPTH][count + 4].
// Eight lanes copy 32 bytes of a row, a warp copies 4 rows, without bank conflicts. Rows after the last one are copies
// of the last row.
template <int count>
struct Turned {
    static constexpr int STEP = THREADS / 8, COPIES = (count + STEP - 1) / STEP;
    unsigned at[COPIES];  // byte offsets of the thread's elements from the tile's first row

    __device__ __forceinline__ Turned(int last, int K) {
#pragma unroll
        for (int r = 0; r < COPIES; ++r) {
            at[r] = 4u * (min((int)threadIdx.x / 8 + r * STEP, last) * (unsigned)K + threadIdx.x % 8);
        }
    }

    // Copies a slice. k0: index along K of the slice's first value. from: address of this value in the tile's first
    // row. Values with a negative index along K become zeros.
    __device__ __forceinline__ void copy_slice(float* to, const void* from, int k0, bool full) const {
        const int row = threadIdx.x / 8, lane_k = threadIdx.x % 8;
        to += lane_k * (count + 4) + row;
#pragma unroll
        for (int r = 0; r < COPIES; ++r) {
            if (count % STEP != 0 && r * STEP + row >= count) break;
            const float* source = reinterpret_cast<const float*>(static_cast<const char*>(from) + at[r]);
#pragma unroll
            for (int k = 0; k < DEPTH; k += 8) {
                const bool inside = full || k0 + lane_k + k >= 0;
                const int skip = inside ? k : -(k0 + lane_k);  // keeps the address inside the row
                copy<1>(to + k * (count + 4) + r * STEP, source + skip, inside);
            }
        }
    }
};

template <int VALUES>
__device__ __forceinline__ void copy_weights(W* shared, const W* global, bool inside) {
    if constexpr (VALUES * sizeof(W) >= 4) {
        copy<VALUES * sizeof(W) / 4>(reinterpret_cast<float*>(shared), reinterpret_cast<const float*>(global), inside);
    } else {
        typedef typename Vec<W, VALUES>::Raw Raw;
        *reinterpret_cast<Raw*>(shared) = inside ? *reinterpret_cast<const Raw*>(global) : Raw(0);
    }
}

// Copies the narrow weights of a slice from (COLUMNS, K) to [COPIES][LOAD], and later converts them to floats in
// [DEPTH][W_STRIDE]. Two lanes copy neighbours along k, a warp copies 16 columns. A thread converts the weights that it
// has copied.
struct Narrow {
    static constexpr int COPIES = DEPTH * COLUMNS / LOAD, MINE = (COPIES + THREADS - 1) / THREADS;
    static constexpr int PAIRS = DEPTH / (2 * LOAD);
    static constexpr int HELD = LOAD < 4 ? 0 : MINE;  // more offsets would take too many registers
    static constexpr int UNROLLED = HELD ? MINE : 1;
    unsigned at[HELD + 1];  // byte offsets of the thread's elements from the tile's first column
    int last, K;

    static __device__ __forceinline__ int column(int v) { return v / (32 * PAIRS) * 16 + v % 32 / 2; }
    static __device__ __forceinline__ int k(int v) { return (v / 32 % PAIRS * 2 + v % 2) * LOAD; }

    __device__ __forceinline__ unsigned offset(int v) const {
        return sizeof(W) * (min(column(v), last) * (unsigned)K + k(v));
    }

    __device__ __forceinline__ Narrow(int last, int K) : last(last), K(K) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) at[i] = offset(i * THREADS + threadIdx.x);
    }

    __device__ __forceinline__ void copy_slice(float* raw, const void* from, int k0, bool full) const {
#pragma unroll UNROLLED
        for (int i = 0; i < MINE; ++i) {
            const int v = i * THREADS + threadIdx.x;
            if (COPIES % THREADS != 0 && v >= COPIES) break;
            const W* source = reinterpret_cast<const W*>(static_cast<const char*>(from) + (HELD ? at[i] : offset(v)));
            const bool inside = full || k0 + k(v) >= 0;
            copy_weights<LOAD>(reinterpret_cast<W*>(raw) + v * LOAD, source - (inside ? 0 : k0 + k(v)), inside);
        }
    }

    static __device__ __forceinline__ void widen_slice(float* to, const float* raw) {
#pragma unroll UNROLLED
        for (int i = 0; i < MINE; ++i) {
            const int v = i * THREADS + threadIdx.x;
            if (COPIES % THREADS != 0 && v >= COPIES) break;
            Vec<W, LOAD> vector = {reinterpret_cast<const typename Vec<W, LOAD>::Raw*>(raw)[v]};
            // The second of two lanes along k stores the upper half of its weights first, which avoids bank conflicts.
            const bool turn = LOAD == 8 && threadIdx.x % 2 == 1;
            if constexpr (LOAD == 8) {
                unsigned* words = reinterpret_cast<unsigned*>(&vector.raw);
                constexpr int HALF = LOAD * sizeof(W) / 8;
#pragma unroll
                for (int j = 0; j < HALF; ++j) {
                    const unsigned low = words[j], high = words[j + HALF];
                    words[j] = turn ? high : low;
                    words[j + HALF] = turn ? low : high;
                }
            }
            float values[LOAD];
            vector.unpack(values);
            float* first_half = to + k(v) * W_STRIDE + column(v) + (turn ? 4 * W_STRIDE : 0);
            float* second_half = first_half - (turn ? 8 * W_STRIDE : 0);
#pragma unroll
            for (int j = 0; j < LOAD; ++j) (j < 4 ? first_half : second_half)[j * W_STRIDE] = values[j];
        }
    }
};

template <bool FIRST, typename A, typename B> struct Choice { typedef A type; };
template <typename A, typename B> struct Choice<false, A, B> { typedef B type; };

// Loads `count` (4 or 2) contiguous values; with STORE 1, one by one, with zeros from index `left` on.
__device__ __forceinline__ void load_some(float (&v)[4], const float* from, int count, int left) {
    if (STORE == 4 && count == 4) {
        ld_four(v, from);
    } else if (STORE == 4) {
        const float2 two = *reinterpret_cast<const float2*>(from);
        v[0] = two.x;
        v[1] = two.y;
    } else {
#pragma unroll
        for (int e = 0; e < count; ++e) v[e] = e < left ? from[e] : 0.0f;
    }
}

__device__ __forceinline__ void store_some(float* to, const float (&v)[4], int count, int left) {
    if (STORE == 4 && count == 4) {
        st_vec(to, make_float4(v[0], v[1], v[2], v[3]));
    } else if (STORE == 4) {
        *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    } else {
#pragma unroll
        for (int e = 0; e < count; ++e) {
            if (e < left) to[e] = v[e];
        }
    }
}

// Launched by operation (variant): linear (tiles)
extern "C" __global__ void __launch_bounds__(THREADS, LT_BLOCKS) linear_tiles(
    const float* __restrict__ x,      // (M, K)
    const W* __restrict__ w,          // (N, K)
    const float* __restrict__ scale,  // (N) or null
    const float* __restrict__ bias,   // (N) or null
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N)
    int M, int K, int N) {
    extern __shared__ __align__(16) float shared[];  // [STAGES][STAGE]

    // Position of the block's tile. Tiles are ordered in bands of BAND rows of tiles, in a band column by column.
    const int down = (M + ROWS - 1) / ROWS, across = (N + COLUMNS - 1) / COLUMNS;
    const int tile = blockIdx.x;
    const int band = tile / (BAND * across), in_band = tile % (BAND * across);
    const int height = min(BAND, down - band * BAND);
    __shared__ int corner[2];  // row and column of the tile, kept here to free registers
    const int tile_row = (band * BAND + in_band % height) * ROWS;
    const int tile_column = in_band / height * COLUMNS;
    if (threadIdx.x == 0) {
        corner[0] = tile_row;
        corner[1] = tile_column;
    }

    typedef Choice<NARROW, Narrow, Turned<COLUMNS>>::type Weights;
    const Turned<ROWS> x_copies(min(ROWS, M - tile_row) - 1, K);
    const Weights w_copies(min(COLUMNS, N - tile_column) - 1, K);
    const int slices = (K + DEPTH - 1) / DEPTH, missing = slices * DEPTH - K;
    const float* x_from = x + ((long long)tile_row * K - missing);
    const W* w_from = w + ((long long)tile_column * K - missing);
    auto copy_x = [&](int slice, bool full, float* to) {
        const int k = slice * DEPTH;
        if (slice < slices) x_copies.copy_slice(to, x_from + k, k - missing, full);
    };
    auto copy_w = [&](int slice, bool full, float* to) {
        const int k = slice * DEPTH, place = NARROW ? RAW_AT : DEPTH * X_STRIDE;
        if (slice < slices) w_copies.copy_slice(to + place, w_from + k, k - missing, full);
    };

    // Position of this thread's outputs. The bits of the lane number are permuted so that each half of a warp reads 8
    // groups of rows and 2 groups of columns, and lanes that differ in one of the lowest two bits share columns or
    // rows.
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int ty = (lane & 1) | (lane >> 1 & 6), tx = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int row = warp / WARPS_ACROSS * WARP_ROWS, column = warp % WARPS_ACROSS * WARP_COLUMNS;
    const int x_at = row + 4 * ty, x_rest = row + 2 * ty;
    const int w_at = DEPTH * X_STRIDE + column + 4 * tx, w_rest = DEPTH * X_STRIDE + column + 16 * FOURS + 2 * tx;
    float sum[SIDE][SPAN] = {};

    if constexpr (NARROW) {
        copy_w(0, false, shared);
        end_group_of_copies();
    }
    constexpr int AHEAD = NARROW ? 1 : 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        copy_x(s, s > 0, shared + s * STAGE);
        copy_w(s + AHEAD, s + AHEAD > 0, shared + (s + AHEAD) * STAGE);
        end_group_of_copies();
    }
    if constexpr (NARROW) {
        wait_for_copies_but<STAGES - 1>();
        Narrow::widen_slice(shared + DEPTH * X_STRIDE, shared + RAW_AT);
    }
    int now = 0;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        wait_for_copies_but<STAGES - 2>();
        __syncthreads();  // the slice has arrived; the previous slice has been read, and can be overwritten
        const int after = now == (STAGES - 1) * STAGE ? 0 : now + STAGE;
        const int before = now == 0 ? (STAGES - 1) * STAGE : now - STAGE;
        copy_x(slice + STAGES - 1, true, shared + before);
        copy_w(slice + STAGES - 1 + AHEAD, true, shared + (NARROW ? now : before));
        end_group_of_copies();
        if (NARROW && slice + 1 < slices) {
            Narrow::widen_slice(shared + after + DEPTH * X_STRIDE, shared + after + RAW_AT);
        }
        const float* slice_at = shared + now;
        add_slice<DEPTH, X_STRIDE, W_STRIDE>(sum, slice_at + x_at, slice_at + w_at, slice_at + x_rest,
                                             slice_at + w_rest);
        now = after;
    }

    // Epilogue: four neighbouring columns at a time, then two remaining columns, if any. The residual of BATCH rows is
    // loaded before their stores: out may be the same memory, so the compiler keeps the order of loads and stores.
    constexpr int VECTORS = FOURS + (SPAN % 4 != 0), BATCH = SIDE < 4 ? SIDE : 4;
#pragma unroll
    for (int g = 0; g < VECTORS; ++g) {
        const int count = g < FOURS ? 4 : 2, n = corner[1] + column + 16 * g + count * tx;
        float factor[4], shift[4];
#pragma unroll
        for (int e = 0; e < count; ++e) {
            factor[e] = scale && n + e < N ? scale[n + e] : 1.0f;
            shift[e] = bias && n + e < N ? bias[n + e] : 0.0f;
        }
#pragma unroll
        for (int first = 0; first < SIDE; first += BATCH) {
            const int m = corner[0] + row + (8 * first + BATCH * ty);
            const int rows = n < N ? min(BATCH, M - m) : 0;
            const long long at = (long long)m * N + n;
            float before[BATCH][4];
            if (residual) {
#pragma unroll
                for (int r = 0; r < BATCH; ++r) {
                    if (r < rows) load_some(before[r], residual + at + (long long)r * N, count, N - n);
                }
            }
#pragma unroll
            for (int r = 0; r < BATCH; ++r) {
                float v[4];
#pragma unroll
                for (int e = 0; e < count; ++e) {
                    v[e] = sum[first + r][4 * g + e] * factor[e] + shift[e];
                    if (LT_GELU) v[e] = gelu(v[e]);
                    if (residual) v[e] += before[r][e];
                }
                if (r < rows) store_some(out + at + (long long)r * N, v, count, N - n);
            }
        }
    }
}
