// A tile of a head's rows in shared memory, for attention/prompt/mma.cu and attention/prompt/mma_hi_lo.cu. The
// including file defines THREADS.
//
// The pitch (bytes between rows in shared memory) is an odd number of 16-byte chunks. Therefore ldmatrix has no bank
// conflicts, and all its offsets are constants.
#pragma once

#include "lib/attention/scores.cuh"
#include "lib/attention/transpose.cuh"

#ifndef ATT_KEYS  // keys per tile
#define ATT_KEYS (SIZE > 128 ? 32 : 64)
#endif

constexpr int KEYS = ATT_KEYS;
constexpr int CHUNKS = SIZE / 8, PITCH = 16 * (CHUNKS + 1);  // 16-byte chunks per row; bytes between rows
constexpr int TILE = KEYS * PITCH;

// Copies ROWS rows of a head to shared memory. Only rows before `there` are read; zeros are stored for other rows.
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
