// RoPE's pairs of channels in a thread's registers. Included by learn/positions/rope.cu, positions/rope_qkv.cu,
// positions/rope_append.cu.
//
// Pair k of a head is channels 2k and 2k + 1 or, with ROPE_HALF_SPLIT, channels k and k + D / 2.
#pragma once
#include "lib/rotation.cuh"
#include "lib/fresh.cuh"
#include "lib/storage.cuh"

#ifndef ROPE_D
#define ROPE_D 128
#endif
#ifndef ROPE_HALF_SPLIT
#define ROPE_HALF_SPLIT 0
#endif
#ifndef ROPE_WIDTH  // elements per load (at most 16 bytes): a power of two that divides D, or D / 2 with
#define ROPE_WIDTH 4  // ROPE_HALF_SPLIT; x, out and their strides are aligned to a load
#endif
#ifndef ROPE_THREADS  // threads that share a head
#define ROPE_THREADS 32
#endif
#ifndef ROPE_HEADS  // heads per thread
#define ROPE_HEADS 4
#endif

constexpr bool TOGETHER = !ROPE_HALF_SPLIT && ROPE_WIDTH > 1;  // each load holds whole pairs of channels
constexpr int PAIRS = TOGETHER ? ROPE_WIDTH / 2 : ROPE_WIDTH;  // pairs per thread and head
constexpr int LOADS = TOGETHER ? 1 : 2;
constexpr int APART = ROPE_HALF_SPLIT ? ROPE_D / 2 : 1;  // distance between the two channels of a pair
static_assert(ROPE_D % 2 == 0, "a head is whole pairs: ROPE_D must be even");
static_assert((ROPE_HALF_SPLIT ? ROPE_D / 2 : ROPE_D) % ROPE_WIDTH == 0, "a head, or half of one, is whole loads");

template <typename E>
struct Pairs {  // a thread's pairs of channels of one head, in their storage type
    typedef Vec<E, ROPE_WIDTH> Vector;
    Vector raw[LOADS];

    __device__ void load_once(const E* from) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) raw[n] = Vector::load_once(from + n * APART);
    }

    __device__ void load_fresh(const E* from) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) raw[n] = ::load_fresh<E, ROPE_WIDTH>(from + n * APART);
    }

    template <typename To>
    __device__ void copy(To* to) const {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            float v[ROPE_WIDTH];
            raw[n].unpack(v);
            Vec<To, ROPE_WIDTH>::store(to + n * APART, v);
        }
    }

    template <typename To>
    __device__ void turn(const Rotation (&by)[PAIRS], To* to, float factor = 1.0f) const {
        float v[LOADS][ROPE_WIDTH];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) raw[n].unpack(v[n]);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const Rotation own = grown(by[p], factor);
            ::turn(own, TOGETHER ? v[0][2 * p] : v[0][p], TOGETHER ? v[0][2 * p + 1] : v[LOADS - 1][p]);
        }
#pragma unroll
        for (int n = 0; n < LOADS; ++n) Vec<To, ROPE_WIDTH>::store(to + n * APART, v[n]);
    }
};
