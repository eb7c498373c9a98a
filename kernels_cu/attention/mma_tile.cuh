// A tile of rows of a head in shared memory, and the transposition of a warp's outputs before the store. Shared by
// attention/mma.cu and attention/mma_two_part.cu; the including file defines THREADS.
//
// The pitch is an odd number of chunks of 16 bytes: ldmatrix has no bank conflicts, and all its offsets are constants.
#pragma once

#include "attention/scores.cuh"

constexpr int KEYS = 64;                                     // of a tile
constexpr int CHUNKS = SIZE / 8, PITCH = 16 * (CHUNKS + 1);  // of a row in shared memory
constexpr int TILE = KEYS * PITCH;

// Copies ROWS rows of a head to shared memory. Rows from `there` on are not read and become zeros.
template <int ROWS>
__device__ __forceinline__ void copy_rows(char* to, const T* from, long long stride, int there) {
    constexpr int STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0, "all threads copy alike");
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    from += row * stride + 8 * chunk;
    to += row * PITCH + 16 * chunk;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) copy16(to + i * PITCH, from + i * stride, row + i < there);
}

// Transposes over four neighbouring lanes: v[n] of lane t becomes v[t] of lane n. Pairs of columns that are 8 apart
// thus become 8 contiguous columns, which a lane stores at once.
__device__ __forceinline__ void turn(unsigned (&v)[4], int t) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n & bit) continue;
            const unsigned got = __shfl_xor_sync(0xffffffffu, t & bit ? v[n] : v[n + bit], bit);
            if (t & bit) {
                v[n] = got;
            } else {
                v[n + bit] = got;
            }
        }
    }
}
