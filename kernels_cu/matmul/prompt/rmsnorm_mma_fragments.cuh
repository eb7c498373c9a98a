// A warp's operands: loads from shared memory into registers, conversion of FP8 to T, and the tensor-core products.
// Part of matmul/prompt/rmsnorm_mma_tile.cuh, which describes the constants.
#pragma once

// Converts two FP8 numbers, in the upper bytes of the two 16-bit halves of `bits`, to values of T. The conversion of
// finite numbers is exact. If T is fp16, results for E4M3 are 1/256 of the value; WEIGHT_FACTOR compensates for this.
__device__ __forceinline__ unsigned convert_fp8(unsigned bits) {
#if defined(STORAGE_BF16) && defined(WEIGHT_E4M3)
    return multiply2((bits & 0x80008000u) | (bits & 0x7f007f00u) >> 4, 0x7b807b80u);  // times 2^120
#elif defined(STORAGE_BF16)
    return multiply2((bits & 0x80008000u) | (bits & 0x7f007f00u) >> 3, 0x77807780u);  // times 2^112
#elif defined(WEIGHT_E4M3)
    return (bits & 0x80008000u) | (bits & 0x7f007f00u) >> 1;
#else
    return bits;
#endif
}

#if defined(WEIGHT_E4M3) && !defined(STORAGE_BF16)
constexpr float WEIGHT_FACTOR = 256.0f;
#else
constexpr float WEIGHT_FACTOR = 1.0f;
#endif

// A warp's operands of x for a step: 16 values along K of all rows of the warp.
struct Rows {
    unsigned a[FRAGS_M][4];
};

struct Columns {
    unsigned b[FRAGS_N][2];  // with FP8, b[n] (n even) holds fragments n and n + 1
    unsigned gamma[2];

    // Stores the operand registers of 8-column fragment n in `to`, with FP8 converted to T.
    __device__ __forceinline__ void get(int n, unsigned (&to)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!FP8) {
                to[i] = b[n][i];
            } else if (QUADS) {
                const unsigned bytes = b[n / 2 * 2][n % 2];
                to[i] = convert_fp8(i ? spread<2, 3>(bytes) : spread<0, 1>(bytes));
            } else {
                const unsigned bytes = b[n / 2 * 2][i];
                to[i] = convert_fp8(n % 2 ? spread<1, 3>(bytes) : spread<0, 2>(bytes));
            }
        }
    }
};

struct Warp {  // a warp's position among the warps of a block; the lane number is 4 g + t
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n = threadIdx.x / 32 % MMA_WARPS_N, m = threadIdx.x / 32 / MMA_WARPS_N % MMA_WARPS_M;
    const int k = threadIdx.x / 32 / (MMA_WARPS_N * MMA_WARPS_M);
};

// Offsets of a lane's fragments, in bytes from the start of a stage.
struct Places {
    int a, b, gamma;

    __device__ __forceinline__ explicit Places(const Warp& warp) {
        const int lane = warp.lane, step = warp.k * STEPS, column = warp.n * WARP_COLUMNS;
        const int a_row = warp.m * WARP_ROWS + (QUADS ? lane / 4 : lane % 16);
        a = a_row * A_PITCH + (QUADS ? 8 * (lane % 4) : 16 * (lane / 16)) + 32 * step;
        gamma = GAMMA + (QUADS ? 8 : 4) * (lane % 4) + 32 * step;
        if (!MMA_W_NK) {
            b = (16 * step + lane % 16) * B_PITCH + column * (int)sizeof(W) + (FP8 ? 0 : 16 * (lane / 16));
        } else if (FP8) {
            b = (column + lane % 16) * B_PITCH + 16 * step;
        } else {
            b = (column + lane / 16 * 8 + lane % 8) * B_PITCH + 16 * (lane / 8 % 2) + 32 * step;
        }
        b += WEIGHTS;
    }

    __device__ __forceinline__ void load(Rows& to, int m, const char* stage, int step) const {
        const char* from = stage + a + 32 * step + 16 * m * A_PITCH;
        unsigned(&f)[4] = to.a[m];
        if (QUADS) {
            const uint2 upper = *reinterpret_cast<const uint2*>(from);
            const uint2 lower = *reinterpret_cast<const uint2*>(from + 8 * A_PITCH);
            f[0] = upper.x, f[1] = lower.x, f[2] = upper.y, f[3] = lower.y;
        } else {
            load_matrices<false>(f[0], f[1], f[2], f[3], from);
        }
    }

    __device__ __forceinline__ void load(Columns& to, const char* stage, int step) const {
        const char* from = stage + b + step * (MMA_W_NK ? 16 * (int)sizeof(W) : 16 * B_PITCH);
        constexpr int NEXT = MMA_W_NK ? 8 * B_PITCH : 8 * (int)sizeof(W);  // bytes from a column to the 8th next column
#pragma unroll
        for (int n = 0; n < FRAGS_N; n += 2, from += 2 * NEXT) {
            if (FP8 || n + 1 == FRAGS_N) {
                load_matrices<!MMA_W_NK>(to.b[n][0], to.b[n][1], from);
            } else {
                load_matrices<!MMA_W_NK>(to.b[n][0], to.b[n][1], to.b[n + 1][0], to.b[n + 1][1], from);
            }
        }
        if (MMA_NORM) {
            const char* pairs = stage + gamma + 32 * step;
            to.gamma[0] = *reinterpret_cast<const unsigned*>(pairs);
            to.gamma[1] = *reinterpret_cast<const unsigned*>(pairs + (QUADS ? 4 : 16));
        }
    }
};

// Multiplies 16 rows of the warp, scaled by gamma, by all columns of the warp. If `add_squares`, adds the squares of
// the unscaled rows to `squares`.
__device__ __forceinline__ void multiply(float (&sums)[FRAGS_N][4], float (&squares)[2], const unsigned (&a)[4],
                                         const unsigned (&b)[FRAGS_N][2], const unsigned (&gamma)[2],
                                         bool add_squares) {
    unsigned scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = MMA_NORM ? multiply2(a[i], gamma[i / 2]) : a[i];
#pragma unroll
    for (int n = 0; n < FRAGS_N; ++n) mma(sums[n], scaled, b[n]);
    if (MMA_NORM && add_squares) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[2];
            Vec<T, 2>{a[i]}.unpack(v);
            squares[i % 2] += v[0] * v[0];
            squares[i % 2] += v[1] * v[1];
        }
    }
}
