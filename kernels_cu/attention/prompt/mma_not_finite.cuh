// Products of P (softmax weights) with infinite and NaN values of V, for 16 keys that only some of 16 queries see.
// Included by attention/prompt/mma.cu, which describes the purpose, and attention/prompt/mma_hi_lo.cu.
#pragma once

template <int COUNT>
__device__ __forceinline__ bool any_not_finite(const unsigned (&b)[COUNT][2]) {
    unsigned found = 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) found |= not_finite(b[n][0]) | not_finite(b[n][1]);
    return __any_sync(0xffffffffu, found != 0);
}

// Adds the product of P (softmax weights of 16 queries and 16 keys) and b (values of V: infinite, NaN or 0) to `out`,
// key by key, only for the queries that see the key: query i sees keys 0 .. ahead + i, or only the last WINDOW of
// these.
template <int COUNT>
__device__ __forceinline__ void add_by_key(float (*out)[4], const unsigned (&p)[4], const unsigned (&b)[COUNT][2],
                                           int ahead) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int key = 0; key < 16; ++key) {
        const unsigned pair = key / 2 % 4 == t ? (key % 2 ? 0xffff0000u : 0xffffu) : 0u;
        const unsigned first = key < 8 ? pair : 0u, second = key < 8 ? 0u : pair;
        const unsigned a[4] = {p[0] & first, p[1] & first, p[2] & second, p[3] & second};
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const unsigned of_key[2] = {b[n][0] & first, b[n][1] & second};
            float then[4] = {out[n][0], out[n][1], out[n][2], out[n][3]};
            mma(then, a, of_key);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int last = ahead + g + 8 * (e / 2);
                if (last >= key && !is_past(key, last) && !is_finite(then[e])) out[n][e] = then[e];
            }
        }
    }
}

// Adds the product of P and b (values of V, some of which are infinite or NaN) to `out`: of infinite and NaN values as
// add_by_key(). Sets the finite values of b to 0.
template <int COUNT>
__device__ __forceinline__ void multiply_apart(float (*out)[4], const unsigned (&p)[4], unsigned (&b)[COUNT][2],
                                               int ahead) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        const unsigned finite[2] = {finite_of(b[n][0]), finite_of(b[n][1])};
        b[n][0] ^= finite[0], b[n][1] ^= finite[1];
        mma(out[n], p, finite);
    }
    add_by_key(out, p, b, ahead);
}
