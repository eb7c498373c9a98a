// Tiles of a product on tensor cores (mma.sync; sm_75 and newer): the copies of slices along K into shared memory, a
// warp's loads from there, and the loop over copies and products. Shared by matmul/prompt/mma.cu and
// matmul/prompt/mma_hi_lo.cu. The including file selects T (lib/storage.cuh) and may set these constants:
//
//   GEMM_M, GEMM_N                rows and columns of a block's tile
//   GEMM_WARPS_M, GEMM_WARPS_N    warps along the rows and columns of a tile; their product is a power of two
//   GEMM_SLICE                    length of a slice along K
//   GEMM_STAGES                   number of slices that shared memory holds
//   GEMM_EARLY                    slices of w that are copied before the previous kernel has ended
//   GEMM_BLOCKS                   minimum blocks per SM (__launch_bounds__)
//   GEMM_PARTS                    2: hi/lo operands, stored as (2, M, K) and (2, N, K); otherwise 1
//   GEMM_FLOAT_OUT                1: out and residual are float
//   GEMM_GELU                     1: GELU is applied to the sums
//   GEMM_RESIDUAL                 1: the residual is added
//   GEMM_GATED                    1: half of a warp's columns are columns of w, the other half the same columns of up
//
// The grid is persistent: a block processes several tiles, and the ring buffer of slices continues from one tile to the
// next. The next tile's first slices therefore arrive while a tile's results are stored:
//
//   slices     0 1 2 3 | 0 1 2 3 | ...         a slice is requested GEMM_STAGES - 1 slices before it is multiplied
//   multiply   0 1 2 3 store 0 1 2 3 store
//
// The copies of a slice are distributed over the steps (16 along K) of the slice that is being multiplied. The
// fragments (the mma operands) of a step are loaded into registers before the step begins; with GEMM_PARTS 2, fragments
// of low parts are loaded before the first product that needs them. At the last step of a slice, the shared memory of
// the slice is therefore already free.
//
// Rows in shared memory have no padding. The 16-byte chunk c of row r is stored at position c ^ swizzle(r). The eight
// rows that ldmatrix loads at a time are r, r + 1, r + s, r + s + 1, ... r + 3 s + 1, where s is 2, 4 or 8, depending
// on GROUP. Their chunks are in eight different groups of four banks, so ldmatrix has no bank conflicts.
//
//   row            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
//   swizzle(row)   0 1 2 3 4 5 6 7 2 3  0  1  6  7  4  5
//
// In an 8-column fragment of the product, a lane holds two neighbouring columns. The rows of w are assigned to columns
// of fragments so that a lane's values from GROUP fragments are 16 contiguous bytes of the output.
//
// For every tile, the products along K are added in order, 16 at a time, in one chain. Zeros after the end of K do not
// change the sums.
#pragma once

#ifndef GEMM_M
#define GEMM_M 128
#endif
#ifndef GEMM_N
#define GEMM_N 128
#endif
#ifndef GEMM_WARPS_M
#define GEMM_WARPS_M 2
#endif
#ifndef GEMM_WARPS_N
#define GEMM_WARPS_N 2
#endif
#ifndef GEMM_SLICE
#define GEMM_SLICE 64
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 3
#endif
#ifndef GEMM_EARLY
#define GEMM_EARLY 1
#endif
#ifndef GEMM_BLOCKS
#define GEMM_BLOCKS 1
#endif
#ifndef GEMM_PARTS
#define GEMM_PARTS 1
#endif
#ifndef GEMM_FLOAT_OUT  // 1: out and residual are float
#define GEMM_FLOAT_OUT 0
#endif
#ifndef GEMM_GELU
#define GEMM_GELU 0
#endif
#ifndef GEMM_RESIDUAL
#define GEMM_RESIDUAL 0
#endif
#ifndef GEMM_GATED
#define GEMM_GATED 0
#endif

constexpr int THREADS = 32 * GEMM_WARPS_M * GEMM_WARPS_N;
constexpr int WARP_ROWS = GEMM_M / GEMM_WARPS_M, WARP_COLUMNS = GEMM_N / GEMM_WARPS_N;
constexpr int MATRICES = 1 + GEMM_GATED, COLUMNS = GEMM_N / MATRICES;  // COLUMNS: columns of a tile's outputs
constexpr int FRAGS_M = WARP_ROWS / 16, FRAGS_N = WARP_COLUMNS / 8;
constexpr int STEPS = GEMM_SLICE / 16;
constexpr int CHUNKS = GEMM_SLICE / 8, PITCH = 2 * GEMM_SLICE;  // CHUNKS: 16-byte chunks per row; PITCH: bytes per row
constexpr int COPIED = THREADS / CHUNKS;                        // rows copied by the block at a time
constexpr int A_EACH = (GEMM_M + COPIED - 1) / COPIED, W_EACH = (GEMM_N + COPIED - 1) / COPIED;
constexpr int A_COPIES = GEMM_PARTS * A_EACH, COPIES = A_COPIES + GEMM_PARTS * W_EACH;  // copies per thread and slice
constexpr int A_BYTES = GEMM_M * PITCH, W_BYTES = GEMM_N * PITCH;                       // bytes per part in a stage
constexpr int W_AT = GEMM_PARTS * A_BYTES, STAGE = W_AT + GEMM_PARTS * W_BYTES;         // a stage: parts of a, then w
constexpr int GROUP = GEMM_FLOAT_OUT ? 2 : 4;                           // fragments for 16 bytes of a lane
constexpr int WHOLE = FRAGS_N / GROUP * GROUP, EVEN = FRAGS_N / 2 * 2;  // number of fragments in whole groups; in pairs
static_assert(FRAGS_M * 16 * GEMM_WARPS_M == GEMM_M && FRAGS_N * 8 * GEMM_WARPS_N == GEMM_N, "whole fragments");
static_assert((THREADS & (THREADS - 1)) == 0 && THREADS % CHUNKS == 0, "rows are dealt to a power of two of threads");
static_assert(GEMM_SLICE % 64 == 0 && STEPS % 2 == 0, "a row is 128 bytes or a multiple");
static_assert(!GEMM_GATED || (WARP_COLUMNS / 2 % COPIED == 0 && FRAGS_N % (2 * GROUP) == 0), "each half is whole");
static_assert(GEMM_STAGES >= 2 && GEMM_EARLY < GEMM_STAGES, "one slice travels while another is multiplied");

__device__ constexpr int swizzle(int row) { return (row & 7) ^ (row >> 2 & 6); }

__device__ __forceinline__ int place(int row, int chunk) { return row * PITCH + 16 * (chunk ^ swizzle(row)); }

struct Sizes {
    int M, N, K;

    __device__ __forceinline__ int tiles_n() const { return (N - 1) / COLUMNS + 1; }
    __device__ __forceinline__ int tiles() const { return ((M - 1) / GEMM_M + 1) * tiles_n(); }
};

struct Tile {
    int row, column;
};

// Returns tile number `index`. Tiles are ordered in bands of 8 rows of tiles, so that concurrent blocks share rows of a
// and w.
__device__ __forceinline__ Tile tile_at(int index, const Sizes& sizes) {
    constexpr int BAND = 8;
    const int tiles_n = sizes.tiles_n(), first = index / (BAND * tiles_n) * BAND;
    const int height = min(BAND, (sizes.M - 1) / GEMM_M + 1 - first), rest = index - first * tiles_n;
    return {(first + rest % height) * GEMM_M, rest / height * COLUMNS};
}

// Copies the slices of all of the block's tiles into shared memory, one after the other. A thread copies the 16-byte
// chunk number `part` of every COPIED-th row.
struct Copies {
    const T *const a, *const w;
    const long long to_up;  // elements from w to up, with GEMM_GATED
    const Sizes sizes;
    const int row, part, offset;  // thread's first row, its chunk, and the chunk's offset in a slice
    int index, k;                 // index of the tile; start of the next slice
    Copy16 started[COPIES];       // copies of a slice
    int rows, columns;            // rows and columns that remain from the thread's first one on; 0 after the last tile
    const T *from_a, *from_w;     // addresses in the next slice

    __device__ __forceinline__ Copies(const T* a, const T* w, const T* up, const Sizes& sizes)
        : a(a), w(w), to_up(GEMM_GATED ? up - w : 0), sizes(sizes), row(threadIdx.x / CHUNKS),
          part(threadIdx.x % CHUNKS), offset(place(row, part)), index(blockIdx.x), rows(0), columns(0), from_a(a),
          from_w(w) {
        start();
    }

    __device__ __forceinline__ void start() {
        k = 0;
        rows = columns = 0;
        if (index >= sizes.tiles()) return;
        const Tile tile = tile_at(index, sizes);
        rows = sizes.M - tile.row - row;
        columns = sizes.N - tile.column - row;
        from_a = a + (long long)(tile.row + row) * sizes.K + 8 * part;
        from_w = w + (long long)(tile.column + row) * sizes.K + 8 * part;
    }

    __device__ __forceinline__ void advance() {
        from_a += GEMM_SLICE, from_w += GEMM_SLICE, k += GEMM_SLICE;
        if (k >= sizes.K) {
            index += gridDim.x;
            start();
        }
    }

    // Issues copies first .. last - 1 of the thread's COPIES copies for the next slice. Elements outside a matrix are
    // zeros.
    __device__ __forceinline__ void copy(char* stage, int first, int last) {
        const bool inside = k + 8 * part < sizes.K;
#pragma unroll
        for (int i = first; i < last; ++i) {
            if (i < A_COPIES) {
                copy_rows<GEMM_M, GEMM_M>(i, stage, from_a, i / A_EACH, i % A_EACH, sizes.M, inside ? rows : 0);
            } else {
                const int part = (i - A_COPIES) / W_EACH, j = (i - A_COPIES) % W_EACH;
                constexpr int HALF = WARP_COLUMNS / MATRICES;
                copy_rows<GEMM_N, HALF>(i, stage + W_AT, from_w, part, j, sizes.N, inside ? columns : 0);
            }
        }
    }

    // Starts copy `at`, of one of every COPIED rows of a tile. HALF: rows of w or up in succession, or all rows of a.
    template <int ROWS, int HALF>
    __device__ __forceinline__ void copy_rows(int at, char* to, const T* from, int part, int i, int all, int there) {
        const int below = i * COPIED;
        if (below + COPIED > ROWS && row + below >= ROWS) return;
        to += (part * ROWS + below) * PITCH + (offset ^ 16 * swizzle(below));
        const bool gated = GEMM_GATED && HALF < ROWS, second = gated && below / HALF % 2;
        const int down = gated ? below / (2 * HALF) * HALF + below % HALF : below;
        started[at].start(to, from + (second ? to_up : 0) + (part * (long long)all + down) * sizes.K, down < there);
    }
};

// Returns how many of a slice's copies start before step `step`: all at once, if registers hold them until the end.
__device__ __forceinline__ constexpr int copies_before(int step) {
    return HAS_BF16 ? COPIES * step / STEPS : step ? COPIES : 0;
}

struct Warp {  // a warp's position in the tile; the lane number is 4 g + t
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 / GEMM_WARPS_N * WARP_ROWS;
    const int column = threadIdx.x / 32 % GEMM_WARPS_N * WARP_COLUMNS;
};

// A warp's operands in a step of 16 along K: fragments of one part of a and one part of w (GEMM_PARTS).
struct Fragments {
    unsigned a[FRAGS_M][4], w[FRAGS_N][2];
};

// Returns the column, within the warp's columns of the tile, of column j of fragment n.
__device__ __forceinline__ int column_of(int n, int j) {
    const int size = n < WHOLE ? GROUP : n < EVEN ? 2 : 1, at = n % size;
    return 8 * (n - at) + 2 * size * (j / 2) + 2 * at + j % 2;
}

// Offsets of a lane's fragments, in bytes from the start of a stage.
struct Places {
    int a, w, w_pair, w_last;  // w: first two fragments of w; w_pair: last group of 2; w_last: last single fragment

    __device__ __forceinline__ explicit Places(const Warp& warp) {
        const int lane = warp.lane;
        const auto of_w = [&](int n) { return W_AT + place(warp.column + column_of(n, lane % 8), lane / 8 % 2); };
        a = place(warp.row + lane % 16, lane / 16);
        w = of_w(lane / 16), w_pair = of_w(WHOLE + lane / 16), w_last = of_w(EVEN);
    }

    __device__ __forceinline__ void load(Fragments& to, int part, const char* stage, int step) const {
        const char *from_a = stage + part * A_BYTES, *from_w = stage + part * W_BYTES;
#pragma unroll
        for (int m = 0; m < FRAGS_M; ++m) {
            unsigned(&f)[4] = to.a[m];
            load_matrices<false>(f[0], f[1], f[2], f[3], from_a + below(a, 16 * m, step));
        }
        unsigned(&f)[FRAGS_N][2] = to.w;
#pragma unroll
        for (int n = 0; n < EVEN; n += 2) {
            const char* from = from_w + (n < WHOLE ? below(w, column_of(n, 0), step) : below(w_pair, 0, step));
            load_matrices<false>(f[n][0], f[n][1], f[n + 1][0], f[n + 1][1], from);
        }
        if (EVEN < FRAGS_N) {
            load_matrices<false>(f[FRAGS_N - 1][0], f[FRAGS_N - 1][1], from_w + below(w_last, 0, step));
        }
    }

    // Returns the offset of the element `rows` rows below the element at `place`, and `step` steps further along K.
    // Only for values of `rows` that cause no carry in swizzle().
    static __device__ __forceinline__ int below(int place, int rows, int step) {
        return (place ^ 32 * step ^ 16 * swizzle(rows)) + rows * PITCH;
    }
};

typedef float Sums[FRAGS_M][FRAGS_N][4];

// sums += a w
__device__ __forceinline__ void multiply(Sums& sums, const unsigned (&a)[FRAGS_M][4], const unsigned (&w)[FRAGS_N][2]) {
#pragma unroll
    for (int m = 0; m < FRAGS_M; ++m) {
#pragma unroll
        for (int i = 0; i < FRAGS_N; ++i) {
            const int n = m % 2 ? FRAGS_N - 1 - i : i;  // alternating direction: successive products share an operand
            mma(sums[m][n], a[m], w[n]);
        }
    }
}

// Computes all of the block's tiles and calls finish(tile, warp, total) for each. `total`, the sums of a tile, starts
// with zeros. total.add(first, second) is called for every step of 16 along K, with the fragments of the high parts and
// of the low parts of a and w; total.slice(k) is called after the last step of the slice that ends before k.
template <typename Total, typename Finish>
__device__ __forceinline__ void multiply_tiles(const T* a, const T* w, const T* up, const Sizes& sizes, char* shared,
                                               Finish finish) {
    Copies copies(a, w, up, sizes);
    Copies early = copies;
#pragma unroll 1
    for (int s = 0; s < GEMM_EARLY; ++s, early.advance()) {
        early.copy(shared + s * STAGE, A_COPIES, COPIES);
        end_copies(early.started);
    }
    wait_for_previous();
#pragma unroll 1
    for (int s = 0; s < GEMM_STAGES - 1; ++s, copies.advance()) {
        copies.copy(shared + s * STAGE, 0, A_COPIES);
        if (s >= GEMM_EARLY) copies.copy(shared + s * STAGE, A_COPIES, COPIES);
        end_copies(copies.started);
        end_group();
    }
    char *stage = shared, *next_copied = shared + (GEMM_STAGES - 1) * STAGE;
    copies.copy(next_copied, 0, copies_before(1));
    const Warp warp;
    const Places places(warp);
    wait_for_groups<GEMM_STAGES - 2>();
    __syncthreads();
    Fragments now, next;
    places.load(now, 0, stage, 0);
#pragma unroll 1
    for (int index = blockIdx.x; index < sizes.tiles(); index += gridDim.x) {
        Total total = {};
#pragma unroll 1
        for (int k = 0; k < sizes.K; k += GEMM_SLICE) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int then = (step + 1) % STEPS;
                Fragments second;
                if (GEMM_PARTS > 1) places.load(second, 1, stage, step);
                if (then == 0) {
                    end_copies(copies.started);
                    next_copied = stage;
                    stage = stage == shared + (GEMM_STAGES - 1) * STAGE ? shared : stage + STAGE;
                    wait_for_groups<GEMM_STAGES - 2>();
                    __syncthreads();  // the next slice has arrived; this slice is in registers
                }
                places.load(next, 0, stage, then);
                copies.copy(next_copied, copies_before(then), copies_before(then + 1));
                if (then == STEPS - 1) {
                    end_group();
                    copies.advance();
                }
                total.add(now, second);
                now = next;
            }
            total.slice(k + GEMM_SLICE);
        }
        finish(tile_at(index, sizes), warp, total);
        __syncwarp();  // reconverge: lanes without rows have skipped the stores
    }
    end_group();
    wait_for_groups<0>();  // pending copies: zeros for slices after the last one
}
