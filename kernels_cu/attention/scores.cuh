// What attention on tensor cores does with scores, whatever multiplies: part of attention/mma.cu, attention/mma_two_part.cu
// and attention/hopper.cu. The file that includes it has chosen T, which has 16 bits (lib/storage.cuh).
//
//   P = exp2(S UNIT - reference)     S = q . k, before its division by sqrt(64)
//
// A row's reference is what its largest score has been, less 8: P, rounded to T, has its largest value from 2^8 to
// 2^15, and what is 2^-32 of that is not yet zero in fp16. The reference moves, and O is scaled, only when a score
// would pass 2^15: seldom after the first keys.
//
// A key that a query does not see has P 0, but 0 NaN is NaN. So where some of the keys multiplied at once are not seen
// by all queries, values that are not finite are taken out of V, and reach the queries that do see them by other means.
#pragma once

#include "lib/common.cuh"

constexpr int SIZE = 64;                         // channels of a head
constexpr float UNIT = 1.4426950408889634f / 8;  // exp(s / sqrt(64)) is exp2(s UNIT)
constexpr float BELOW = 8, AT_MOST = 15;         // log2 of P's largest value: when the reference is set, and ever

// Of two values of T in a register, those that are infinite or NaN: their sign bits are set. (All bits of them:
// these, shifted right by 15, times 0xffff.)
__device__ __forceinline__ unsigned not_finite(unsigned pair) {
#if defined(STORAGE_BF16)
    return ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
#else
    return ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
#endif
}

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }
