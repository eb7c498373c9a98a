// Transposition of a warp's outputs before the store, for the tensor-core attention kernels.
#pragma once

// Transposes the four words v of each of four neighbouring lanes: v[n] of lane t becomes v[t] of lane n. Each lane then
// holds 8 contiguous 16-bit columns instead of four pairs of columns that are 8 apart, and can store them at once.
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
