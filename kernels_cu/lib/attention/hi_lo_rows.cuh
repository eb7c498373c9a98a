// A warp's rows in attention/prompt/mma_hi_lo.cu and attention/prompt/wgmma_hi_lo.cu, which describe the formula: the
// softmax of hi/lo numbers (lib/hi_lo.cuh), the sums over keys, and the stores. The including file includes
// lib/attention/scores.cuh and lib/sm80.cuh.
//
// A warp has 16 rows. Lane 4 g + t (t < 4) holds columns 8 n + 2t and 8 n + 2t + 1 (n = 0, 1, ...) of rows g and g + 8.
#pragma once

#ifndef ATT_ONE_SCALE  // 1: all rows have the same scale
#define ATT_ONE_SCALE 0
#endif

#include "lib/attention/transpose.cuh"

constexpr float CROSS = 1.0f / 2048;  // factor of lo in hi + lo / 2048
constexpr int COLUMNS = SIZE / 8, SUMS = 4 * COLUMNS;  // SUMS: output sums per thread

// Represents two floats as hi + lo / 2048. Registers `hi` and `lo` hold one float16 number per float.
struct Split {
    unsigned hi, lo;

    __device__ __forceinline__ Split(float a, float b) {
        float near[2];
        hi = pack2(a, b);
        Vec<T, 2>{hi}.unpack(near);
        lo = pack2((a - near[0]) * LOW, (b - near[1]) * LOW);
    }
};

// Loads the scales of the lane's keys. scale: the scale of the warp's first key; only the first `there` keys exist.
template <int COUNT>
__device__ __forceinline__ void load_scales(float (&of_key)[COUNT][2], const float* scale, int there) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int key = 8 * n + threadIdx.x % 4 * 2 + e;
            of_key[n][e] = ATT_ONE_SCALE ? 1.0f : __ldcg(scale + min(key, there - 1));
        }
    }
}

// The sums of a warp's rows over the keys so far.
struct Rows {
    float out[COLUMNS][4];
    float unit[2];               // UNIT (factor of scores) times the row's scale, or with ATT_ONE_SCALE its square
    float sum[2], reference[2];  // sum: sum of P over the lane's keys
    float top[2];                // largest scale of the keys that the row has processed

    // Begins with no keys. scale: the scale of the warp's first row, of which only the first `left` rows exist.
    __device__ __forceinline__ void clear(const float* scale, int left) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) out[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 8 * r + threadIdx.x % 32 / 4;
            const float own = __ldcg(scale + (ATT_ONE_SCALE || row >= left ? 0 : row));
            unit[r] = ATT_ONE_SCALE ? own * UNIT * own : own * UNIT;
            sum[r] = top[r] = 0.0f;
            reference[r] = -INFINITY;
        }
    }

    // Computes P (softmax weights) in two parts, p (hi) and q (lo), from the scores of 8 COUNT keys with the scales
    // of_key. s: products hi hi of the scores; cross: hi lo + lo hi. The scores overwrite s: with other registers for
    // them, attention_fp32_wgmma would take up to 5 % longer. With MASKED, not all rows see all of these keys. If
    // causal, row i of the warp sees keys 0 .. last + i, or only the last WINDOW of these; otherwise all rows see keys
    // 0 .. last.
    template <bool MASKED, int COUNT>
    __device__ __forceinline__ void soften(float* s, const float* cross, const float (&of_key)[COUNT][2],
                                           unsigned (&p)[COUNT / 2][4], unsigned (&q)[COUNT / 2][4], int last) {
        const int lane = threadIdx.x % 32;
        // The last key that row g = lane / 4 sees, relative to the lane's first key.
        const int sees = last + (ATT_CAUSAL ? lane / 4 : 0) - 2 * (lane % 4);
        float largest[2] = {-INFINITY, -INFINITY}, highest[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int ahead = 8 * n + e % 2 - (ATT_CAUSAL ? 8 * (e / 2) : 0);
                const bool visible = !MASKED || (ahead <= sees && !is_past(ahead, sees));
                float& score = s[4 * n + e];
                score = visible ? fmaf(cross[4 * n + e], CROSS, score) * of_key[n][e % 2] : -INFINITY;
                largest[e / 2] = fmaxf(largest[e / 2], score);
                if (!ATT_ONE_SCALE) highest[e / 2] = fmaxf(highest[e / 2], visible ? of_key[n][e % 2] : 0.0f);
            }
        }
        float base[2], factor[2], down[2] = {1.0f, 1.0f};
        bool moves = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float old = reference[r], next = fmaf(lanes_max<4>(largest[r]), unit[r], -BELOW);
            const bool passes = next > old + (AT_MOST - BELOW);  // false if all scores are -inf
            factor[r] = passes ? exp2_fast(old - next) : 1.0f;
            sum[r] = __fmul_rn(sum[r], factor[r]);  // rounded: never fused with the next addition
            reference[r] = passes ? next : old;
            base[r] = reference[r] == -INFINITY ? 0.0f : -reference[r];  // not +inf: -inf + inf is NaN
            moves |= passes;
            if (ATT_ONE_SCALE) continue;
            const float higher = lanes_max<4>(highest[r]);
            down[r] = WINDOW && higher == 0.0f ? 0.0f : inverse_of(higher);  // 0: the row has seen no key so far
            factor[r] *= top[r] * down[r];  // usually times 1: the largest scale rarely grows
            moves |= higher > top[r];
            top[r] = higher;
        }
        if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) out[i / 4][i % 4] *= factor[i % 4 / 2];
        }
#pragma unroll
        for (int k = 0; k < COUNT / 2; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // weights of row lane / 4 + 8 (i % 2), for keys 8 (i / 2) to 8 (i / 2) + 7
                const int n = 2 * k + i / 2, r = i % 2;
                const float a = exp2_fast(fmaf(s[4 * n + 2 * r], unit[r], base[r]));
                const float b = exp2_fast(fmaf(s[4 * n + 2 * r + 1], unit[r], base[r]));
                sum[r] += a;
                sum[r] += b;
                const Split both(a * (of_key[n][0] * down[r]), b * (of_key[n][1] * down[r]));
                p[k][i] = both.hi;
                q[k][i] = both.lo;
            }
        }
    }

    // Passes the sums to another warp with the same rows. `to`, and `from` in add_given(): address of a thread's first
    // value. Consecutive values of a thread are STRIDE floats apart.
    template <int STRIDE>
    __device__ __forceinline__ void give(float* to) const {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) to[i * STRIDE] = out[i / 4][i % 4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            to[(SUMS + r) * STRIDE] = sum[r];
            to[(SUMS + 2 + r) * STRIDE] = reference[r];
            to[(SUMS + 4 + r) * STRIDE] = top[r];
        }
    }

    // Adds the passed sums. The result does not depend on which of the two warps adds.
    template <int STRIDE>
    __device__ __forceinline__ void add_given(const float* from) {
        float own[2], others[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float other = from[(SUMS + 2 + r) * STRIDE], both = fmaxf(reference[r], other);
            const float point = both == -INFINITY ? 0.0f : both;  // exp2(-inf) is 0, but exp2(-inf + inf) is NaN
            own[r] = exp2_fast(reference[r] - point);
            others[r] = exp2_fast(other - point);
            sum[r] = __fmul_rn(sum[r], own[r]) + __fmul_rn(from[(SUMS + r) * STRIDE], others[r]);
            if (ATT_ONE_SCALE) continue;
            const float theirs = from[(SUMS + 4 + r) * STRIDE], higher = fmaxf(top[r], theirs);
            const float down = inverse_of(higher);
            own[r] *= top[r] * down;
            others[r] *= theirs * down;
            top[r] = higher;
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            float& o = out[i / 4][i % 4];
            o = __fmul_rn(o, own[i % 4 / 2]) + __fmul_rn(from[i * STRIDE], others[i % 4 / 2]);
        }
    }

    // Stores the scales of the first `left` rows in `to`, unless `to` is null. The scale of a row is the largest scale
    // of the keys that the row sees, or `one` with ATT_ONE_SCALE.
    __device__ __forceinline__ void store_scales(float* to, float one, int left) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 8 * r + lane / 4;
            if (to && lane % 4 == 0 && row < left) to[row] = ATT_ONE_SCALE ? one : top[r];
        }
    }

    // Divides the rows by their sums of P, and stores the first `left` rows at `to`. The low part of a value is stored
    // `part` elements after its high part.
    __device__ __forceinline__ void store(T* to, long long part, long long stride, int left) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float factor = 1.0f / lanes_sum<4>(sum[r]);
            const int row = 8 * r + g;
#pragma unroll
            for (int piece = 0; piece < SIZE / 32; ++piece) {
                unsigned v[4], w[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float(&c)[4] = out[4 * piece + n];
                    const Split both(c[2 * r] * factor, c[2 * r + 1] * factor);
                    v[n] = both.hi;
                    w[n] = both.lo;
                }
                turn(v, t);
                turn(w, t);
                T* at = to + row * stride + 32 * piece + 8 * t;
                if (row < left) {
                    *reinterpret_cast<uint4*>(at) = {v[0], v[1], v[2], v[3]};
                    *reinterpret_cast<uint4*>(at + part) = {w[0], w[1], w[2], w[3]};
                }
            }
        }
    }
};
