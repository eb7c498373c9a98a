// A tile of rows of a head in shared memory, and other pieces of attention on tensor cores. The file that includes it
// has chosen THREADS, and T, which has 16 bits (storage.cuh).
//
// A pitch of 9 chunks of 16 bytes: ldmatrix meets no bank conflict, and all its offsets are constants.
#pragma once

constexpr int SIZE = 64, KEYS = 64;                          // channels of a head, keys of a tile
constexpr int CHUNKS = SIZE / 8, PITCH = 16 * (CHUNKS + 1);  // of a row in shared memory
constexpr int TILE = KEYS * PITCH;

// Of two values of T in a register, those that are infinite or NaN: their sign bits are set.
__device__ __forceinline__ unsigned not_finite(unsigned pair) {
#if defined(STORAGE_BF16)
    return ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
#else
    return ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
#endif
}

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }

// ROWS rows of a head into shared memory: zeros for those from `there` on, which are not read.
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

    // Of four neighbouring lanes: what lane t had as v[n], lane n gets as v[t].
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
