// Rows that a block of a mixture of experts multiplies, in products of decoding. A tile of `expert_tiles`
// (experts/tiles.cu) names an expert and some choices of this expert; the block reads the rows of x that made these
// choices, and stores a row of out for each choice.
#pragma once

#ifndef DECODE_EXPERTS  // 0: no experts, rows of x are neighbours; else choice c is of row c / DECODE_EXPERTS of x
#define DECODE_EXPERTS 0
#endif

#if DECODE_EXPERTS
__shared__ int choices[16];  // numbers of the choices of the block's rows

// Returns the row of x that the block's row r multiplies.
__device__ __forceinline__ long long x_row(int r) { return choices[r] / DECODE_EXPERTS; }
#else
__device__ __forceinline__ long long x_row(int r) { return r; }
#endif

// Returns whether a tile lacks row r of a block that has `rows` rows. Blocks without experts repeat their last row.
__device__ __forceinline__ bool is_missing(int r, int rows) { return DECODE_EXPERTS && r >= rows; }

#if DECODE_EXPERTS
// Up to ROWS choices of a tile (1 + places), from choice `first` on. An earlier kernel writes the tile, so the expert
// and the place of its weights are known only after the wait for this kernel. All threads of the block call the
// constructor. After its barrier, the block may overwrite the sums in shared memory of the previous tile.
template <int ROWS>
struct ExpertShare {
    int expert;  // -1: the tile is after the last one
    int count;   // number of choices

    __device__ __forceinline__ ExpertShare(const int* tile, int first, int places) {
        static_assert(ROWS <= 16, "the block's choices");
        const int at = first + threadIdx.x;
        const int choice = threadIdx.x < ROWS && at < places ? __ldcg(tile + 1 + at) : -1;
        expert = __ldcg(tile);
        if (choice >= 0) choices[threadIdx.x] = choice;
        count = __syncthreads_count(choice >= 0);
    }
};

// An epilogue (lib/decode/epilogues.cuh) that stores the outputs of the block's row m in the row of its choice.
struct ToChoices {
    static constexpr bool ROTATES = false, BY_ROW = true;
    typedef int Late;  // number of the choice
    float* out;        // (choices, N)
    int N;

    __device__ Late late(int m, int) const { return choices[m]; }
    __device__ float value(float v, Late) const { return v; }
    __device__ void store(int, int n, float v, Late choice) const { out[(long long)choice * N + n] = v; }
};
#endif
