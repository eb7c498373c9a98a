// Copies of a tile's operands into shared memory with cp.async, slice by slice. Part of
// matmul/prompt/rmsnorm_mma_tile.cuh, which describes the constants.
#pragma once

__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// The 16-byte chunks that a thread copies, of a matrix with ROWS rows of WIDTH chunks: chunk `part` of every STEP-th
// row, starting with row `row`.
template <int WIDTH, int ROWS>
struct Share {
    static constexpr int LANES = power_of_two(WIDTH), STEP = THREADS / LANES, PASSES = (ROWS + STEP - 1) / STEP;
    static_assert(LANES <= THREADS, "a row is shared by the threads of one block");
    const int row = threadIdx.x / LANES, part = threadIdx.x % LANES;

    __device__ __forceinline__ bool has(int pass) const {
        return (WIDTH == LANES || part < WIDTH) && (ROWS % STEP == 0 || row + pass * STEP < ROWS);
    }
};

struct Inputs {
    const T* x;         // (M, K), rows x_stride apart
    const T* residual;  // (M, K)
    T* sum;             // (M, K) or null
    const T* gamma;     // (K)
    const W* w;         // (K, N) or (N, K)
    const W* w3;        // same shape as w; only with two weight matrices
    long long x_stride;
    int M, N, K;
};

// Copies slices of a tile's operands into shared memory, one after the other. `x`, `residual` and `w` are the addresses
// of the thread's first elements of the next slice.
template <int MATRICES>
struct Copies {
    static constexpr int COLUMNS = MMA_COLUMNS / MATRICES;  // columns of the tile from each matrix
    static constexpr int WIDE = 16 / sizeof(W);             // weights per chunk
    static constexpr bool ADDS = MMA_RESIDUAL && MATRICES == 2;
    static_assert(COLUMNS % WIDE == 0 && COLUMNS % 8 == 0, "whole chunks of each matrix");
    const Inputs& in;
    const Tile& tile;
    const Share<A_CHUNKS, MMA_ROWS> a;
    const Share<B_CHUNKS, B_ROWS> b;
    const T *x, *residual;
    const W* w;
    long long to_w3;  // MMA_W_NK: elements from row COLUMNS of the tile in w to its row 0 in w3
    int k, rows, columns;  // start of the next slice; rows of x and columns of w left from the thread's first on
    int turn;              // start of the next slice for which this block stores x + residual

    __device__ __forceinline__ Copies(const Inputs& in, const Tile& tile)
        : in(in), tile(tile), k(0), turn(tile.index_n * MMA_SLICE) {
        const int row = tile.row + a.row;
        rows = in.M - row;
        x = in.x + row * in.x_stride + 8 * a.part;
        residual = ADDS ? in.residual + (long long)row * in.K + 8 * a.part : x;
        if (MMA_W_NK) {
            columns = in.N - tile.column - b.row;
            w = in.w + (long long)(tile.column + b.row) * in.K + WIDE * b.part;
            to_w3 = MATRICES == 2 ? in.w3 - in.w - (long long)COLUMNS * in.K : 0;
        } else {
            const bool second = MATRICES == 2 && WIDE * b.part >= COLUMNS;
            const int n = tile.column + WIDE * b.part - (second ? COLUMNS : 0);
            columns = in.N - n;
            w = (second ? in.w3 : in.w) + (long long)b.row * in.N + n;
        }
    }

    // Issues the copies of the next slice. Elements outside the matrices become zeros. Slices after the end of K are
    // copied as zeros without a branch, so the compiler can interleave the copies with the multiplication.
    __device__ __forceinline__ void next(char* stage) {
        copy_x(stage + a.row * A_PITCH + 16 * a.part);
        if (MMA_NORM && threadIdx.x < A_CHUNKS) {
            const int at = k + 8 * threadIdx.x;
            copy16(stage + GAMMA + 16 * threadIdx.x, in.gamma + at, at < in.K);
        }
        copy_w(stage + WEIGHTS + b.row * B_PITCH + 16 * b.part);
        end_group();
        x += MMA_SLICE, residual += MMA_SLICE, k += MMA_SLICE;
        w += MMA_W_NK ? MMA_SLICE : (long long)MMA_SLICE * in.N;
    }

    __device__ __forceinline__ void copy_x(char* to) const {
        const int left = k + 8 * a.part < in.K ? rows : 0;
        const T *from = x, *more = residual;
#pragma unroll
        for (int i = 0; i < a.PASSES; ++i) {
            if (a.has(i)) {
                copy16(to + i * a.STEP * A_PITCH, from, i * a.STEP < left);
                if (ADDS) copy16(to + RESIDUAL + i * a.STEP * A_PITCH, more, i * a.STEP < left);
            }
            from += a.STEP * in.x_stride, more += (long long)a.STEP * in.K;
        }
    }

    __device__ __forceinline__ void copy_w(char* to) const {
        int left = MMA_W_NK ? columns : in.K - k - b.row;  // rows of w in memory, counted from the thread's first one
        if (MMA_W_NK ? k + WIDE * b.part >= in.K : columns <= 0) left = -MMA_COLUMNS;  // outside w and w3: load nothing
        const W* from = w;
#pragma unroll
        for (int i = 0; i < b.PASSES; ++i) {
            const bool some = MMA_W_NK && MATRICES == 2 && (i + 1) * b.STEP > COLUMNS;  // some threads load from w3
            const bool second = some && (i * b.STEP >= COLUMNS || b.row + i * b.STEP >= COLUMNS);
            if (b.has(i)) {
                const W* at = from + (second ? to_w3 : 0);
                copy16(to + i * b.STEP * B_PITCH, at, i * b.STEP - (second ? COLUMNS : 0) < left);
            }
            from += (long long)b.STEP * (MMA_W_NK ? in.K : in.N);
        }
    }

    // Adds the residual to x in shared memory. Each thread adds values that it has copied itself, so no barrier is
    // needed. Several blocks compute the same sums x + residual, for tiles with the same rows; each of these blocks
    // stores the sums of other slices to global memory.
    __device__ __forceinline__ void add_residual(char* stage, int first) {
        if (!ADDS || first >= in.K) return;
        const int at = first + 8 * a.part;
        const bool stored = first == turn && in.sum && at < in.K;
        if (first == turn) turn += tile.tiles_n * MMA_SLICE;
#pragma unroll 2
        for (int i = 0; i < a.PASSES; ++i) {
            if (!a.has(i)) continue;
            uint4* of = reinterpret_cast<uint4*>(stage + (a.row + i * a.STEP) * A_PITCH + 16 * a.part);
            const uint4 h = *of, r = *(of + RESIDUAL / 16);
            const uint4 sum = {add2(h.x, r.x), add2(h.y, r.y), add2(h.z, r.z), add2(h.w, r.w)};
            *of = sum;
            if (stored && i * a.STEP < rows) {
                *reinterpret_cast<uint4*>(in.sum + (long long)(tile.row + a.row + i * a.STEP) * in.K + at) = sum;
            }
        }
    }
};
