// Tiles of a product on tensor cores (mma.sync; sm_80 and newer): how slices of K come into shared memory, how warps
// read them, and the loop over both. What the gemm kernels of this folder share. The file that includes it has chosen T
// (lib/storage.cuh) and may set
//
//   GEMM_M, GEMM_N                of a block's tile
//   GEMM_WARPS_M, GEMM_WARPS_N    warps along its rows and columns; their product is a power of two
//   GEMM_SLICE, GEMM_STAGES       how much of K travels at a time, and the slices that shared memory holds
//   GEMM_EARLY                    slices of w that are asked for before the kernel before has ended
//   GEMM_BLOCKS                   blocks that an SM must hold
//   GEMM_PARTS                    1, or 2 matrices of each operand behind one another: (2, M, K) and (2, N, K)
//   GEMM_FLOAT_OUT                1: out and residual are float
//   GEMM_GELU, GEMM_RESIDUAL      1: what else becomes of the sums
//
// The grid is persistent: a block takes tile after tile, and the ring of slices runs on from one tile to the next, so
// that while a tile's results are stored the next one's first slices arrive:
//
//   slices     0 1 2 3 | 0 1 2 3 | ...         copied STAGES - 1 slices ahead of those multiplied
//   multiply   0 1 2 3 store 0 1 2 3 store
//
// A slice's copies are dealt to the steps of 16 of K in which another slice is multiplied. A step's fragments are in
// registers before it starts (those of a second part before its first multiplication), so at the last step of a slice
// its place in the ring is already free.
//
// Rows in shared memory have no padding. Chunk c of 16 bytes of row r lies at c ^ swizzle(r), which gives eight
// different groups of four banks to the eight rows of a fragment: r, r + 1, r + s, r + s + 1, ... r + 3 s + 1, where s
// is 2, or what GROUP makes it, 4 or 8. So ldmatrix meets no bank conflict.
//
// In a product's fragment a lane holds two neighbouring columns. As it is free which row of w stands where, the columns
// are dealt so that a lane's values of GROUP fragments are 16 bytes side by side in the output.
//
// K is added up in order, 16 at a time, in one chain, whatever the tile: zeros past its end change nothing.
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
#ifndef GEMM_FLOAT_OUT  // out and residual are float
#define GEMM_FLOAT_OUT 0
#endif
#ifndef GEMM_GELU
#define GEMM_GELU 0
#endif
#ifndef GEMM_RESIDUAL
#define GEMM_RESIDUAL 0
#endif

constexpr int THREADS = 32 * GEMM_WARPS_M * GEMM_WARPS_N;
constexpr int WARP_ROWS = GEMM_M / GEMM_WARPS_M, WARP_COLUMNS = GEMM_N / GEMM_WARPS_N;
constexpr int FRAGS_M = WARP_ROWS / 16, FRAGS_N = WARP_COLUMNS / 8;
constexpr int STEPS = GEMM_SLICE / 16;
constexpr int CHUNKS = GEMM_SLICE / 8, PITCH = 2 * GEMM_SLICE;  // chunks of 16 bytes in a row, bytes of it
constexpr int COPIED = THREADS / CHUNKS;                        // rows that the block copies at a time
constexpr int A_EACH = (GEMM_M + COPIED - 1) / COPIED, W_EACH = (GEMM_N + COPIED - 1) / COPIED;
constexpr int A_COPIES = GEMM_PARTS * A_EACH, COPIES = A_COPIES + GEMM_PARTS * W_EACH;  // of a thread for a slice
constexpr int A_BYTES = GEMM_M * PITCH, W_BYTES = GEMM_N * PITCH;                       // in shared memory
constexpr int W_AT = GEMM_PARTS * A_BYTES, STAGE = W_AT + GEMM_PARTS * W_BYTES;         // a's parts, then those of w
constexpr int GROUP = GEMM_FLOAT_OUT ? 2 : 4;                           // fragments: 16 bytes of a row in a lane
constexpr int WHOLE = FRAGS_N / GROUP * GROUP, EVEN = FRAGS_N / 2 * 2;  // then one of 2, and one alone
static_assert(FRAGS_M * 16 * GEMM_WARPS_M == GEMM_M && FRAGS_N * 8 * GEMM_WARPS_N == GEMM_N, "whole fragments");
static_assert((THREADS & (THREADS - 1)) == 0 && THREADS % CHUNKS == 0, "rows are dealt to a power of two of threads");
static_assert(GEMM_SLICE % 64 == 0 && STEPS % 2 == 0, "a row is 128 bytes or a multiple");
static_assert(GEMM_STAGES >= 2 && GEMM_EARLY < GEMM_STAGES, "one slice travels while another is multiplied");

__device__ constexpr int swizzle(int row) { return (row & 7) ^ (row >> 2 & 6); }

__device__ __forceinline__ int place(int row, int chunk) { return row * PITCH + 16 * (chunk ^ swizzle(row)); }

struct Sizes {
    int M, N, K;

    __device__ __forceinline__ int tiles_n() const { return (N - 1) / GEMM_N + 1; }
    __device__ __forceinline__ int tiles() const { return ((M - 1) / GEMM_M + 1) * tiles_n(); }
};

struct Tile {
    int row, column;
};

// Tiles in bands of 8 tiles of rows: those that run together then share rows of a and of w.
__device__ __forceinline__ Tile tile_at(int index, const Sizes& sizes) {
    constexpr int BAND = 8;
    const int tiles_n = sizes.tiles_n(), first = index / (BAND * tiles_n) * BAND;
    const int height = min(BAND, (sizes.M - 1) / GEMM_M + 1 - first), rest = index - first * tiles_n;
    return {(first + rest % height) * GEMM_M, rest / height * GEMM_N};
}

// Brings slices of the block's tiles into shared memory, one after the other: chunk `part` of every COPIED-th row.
struct Copies {
    const T *const a, *const w;
    const Sizes sizes;
    const int row, part, offset;  // of the thread's first row in a slice
    int index, k;                 // the tile, and where the next slice starts
    int rows, columns;            // of the matrices, from the thread's first on; none after the last tile
    const T *from_a, *from_w;     // in the next slice

    __device__ __forceinline__ Copies(const T* a, const T* w, const Sizes& sizes)
        : a(a), w(w), sizes(sizes), row(threadIdx.x / CHUNKS), part(threadIdx.x % CHUNKS), offset(place(row, part)),
          index(blockIdx.x), rows(0), columns(0), from_a(a), from_w(w) {
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

    // Some of the COPIES of the next slice; zeros for what lies outside.
    __device__ __forceinline__ void copy(char* stage, int first, int last) const {
        const bool inside = k + 8 * part < sizes.K;
#pragma unroll
        for (int i = first; i < last; ++i) {
            if (i < A_COPIES) {
                copy_rows<GEMM_M>(stage, from_a, i / A_EACH, i % A_EACH, sizes.M, inside ? rows : 0);
            } else {
                const int part = (i - A_COPIES) / W_EACH, j = (i - A_COPIES) % W_EACH;
                copy_rows<GEMM_N>(stage + W_AT, from_w, part, j, sizes.N, inside ? columns : 0);
            }
        }
    }

    template <int ROWS>
    __device__ __forceinline__ void copy_rows(char* to, const T* from, int part, int i, int all, int there) const {
        const int below = i * COPIED;
        if (below + COPIED > ROWS && row + below >= ROWS) return;
        to += (part * ROWS + below) * PITCH + (offset ^ 16 * swizzle(below));
        copy16(to, from + (part * (long long)all + below) * sizes.K, below < there);
    }
};

struct Warp {  // its place in the tile; the lane, as 4 g + t
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 / GEMM_WARPS_N * WARP_ROWS;
    const int column = threadIdx.x / 32 % GEMM_WARPS_N * WARP_COLUMNS;
};

// What a warp multiplies in a step, of one part of a and of w.
struct Fragments {
    unsigned a[FRAGS_M][4], w[FRAGS_N][2];
};

// The column, of a warp's, that stands in column j of its fragment n.
__device__ __forceinline__ int column_of(int n, int j) {
    const int size = n < WHOLE ? GROUP : n < EVEN ? 2 : 1, at = n % size;
    return 8 * (n - at) + 2 * size * (j / 2) + 2 * at + j % 2;
}

// Where a lane reads its fragments, in bytes from the start of a stage.
struct Places {
    int a, w, w_pair, w_last;  // of w: the first two fragments, those of the group of 2, and the one alone

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

    // The place so many rows further, and steps: no row reached this way carries from one bit of swizzle() to another.
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
            const int n = m % 2 ? FRAGS_N - 1 - i : i;  // there and back: neighbours have an operand in common
            mma(sums[m][n], a[m], w[n]);
        }
    }
}

// All of the block's tiles: of each finish(tile, warp, total). total starts with zeros; add(first, second) comes for
// every step of 16 of K, with the fragments of the parts, and slice(k) after those of the slice that ends before k.
template <typename Total, typename Finish>
__device__ __forceinline__ void multiply_tiles(const T* a, const T* w, const Sizes& sizes, char* shared,
                                               Finish finish) {
    Copies copies(a, w, sizes);
    Copies early = copies;
#pragma unroll 1
    for (int s = 0; s < GEMM_EARLY; ++s, early.advance()) early.copy(shared + s * STAGE, A_COPIES, COPIES);
    wait_for_previous();
#pragma unroll 1
    for (int s = 0; s < GEMM_STAGES - 1; ++s, copies.advance()) {
        copies.copy(shared + s * STAGE, 0, A_COPIES);
        if (s >= GEMM_EARLY) copies.copy(shared + s * STAGE, A_COPIES, COPIES);
        end_group();
    }
    char *stage = shared, *next_copied = shared + (GEMM_STAGES - 1) * STAGE;
    copies.copy(next_copied, 0, COPIES / STEPS);
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
                    next_copied = stage;
                    stage = stage == shared + (GEMM_STAGES - 1) * STAGE ? shared : stage + STAGE;
                    wait_for_groups<GEMM_STAGES - 2>();
                    __syncthreads();  // the next slice is there, and all of this one is in registers
                }
                places.load(next, 0, stage, then);
                copies.copy(next_copied, COPIES * then / STEPS, COPIES * (then + 1) / STEPS);
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
        __syncwarp();  // lanes whose rows are past the end have skipped what others did
    }
    end_group();
    wait_for_groups<0>();  // copies of zeros for slices after the last
}
