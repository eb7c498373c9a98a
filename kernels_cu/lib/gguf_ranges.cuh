// Constants of the up to three consecutive ranges of outputs (rows) of a matrix of GGUF blocks (lib/gguf.cuh). Each
// range has one GGUF type.
#pragma once
#include "lib/gguf.cuh"

#ifndef GGUF_TYPE_0
#define GGUF_TYPE_0 6
#endif
#ifndef GGUF_RANGES
#define GGUF_RANGES 1
#endif
#ifndef GGUF_TYPE_1  // GGUF type of the outputs from GGUF_FROM_1 on
#define GGUF_TYPE_1 GGUF_TYPE_0
#endif
#ifndef GGUF_FROM_1
#define GGUF_FROM_1 0
#endif
#ifndef GGUF_TYPE_2  // GGUF type of the outputs from GGUF_FROM_2 on
#define GGUF_TYPE_2 GGUF_TYPE_0
#endif
#ifndef GGUF_FROM_2
#define GGUF_FROM_2 0
#endif

namespace gguf {

template <int RANGE>
struct OfRange {
    static constexpr int TYPE = RANGE == 0 ? GGUF_TYPE_0 : RANGE == 1 ? GGUF_TYPE_1 : GGUF_TYPE_2;
    static constexpr int FROM = RANGE == 0 ? 0 : RANGE == 1 ? GGUF_FROM_1 : GGUF_FROM_2;
    static constexpr bool LAST = RANGE + 1 == GGUF_RANGES;
    static constexpr int NEXT = RANGE == 0 ? GGUF_FROM_1 : GGUF_FROM_2;  // first output of the next range, unless LAST
    typedef Part<TYPE> Of;

    // Returns the number of bytes of w that precede this range of outputs.
    __device__ __forceinline__ static long long begin(int K) {
        long long bytes = 0;
        constexpr int SECOND = GGUF_RANGES > 2 ? GGUF_FROM_2 - GGUF_FROM_1 : 0;
        if (RANGE > 0) bytes += (long long)((GGUF_FROM_1 + 7) / 8) * Part<GGUF_TYPE_0>::row_bytes(K);
        if (RANGE > 1) bytes += (long long)((SECOND + 7) / 8) * Part<GGUF_TYPE_1>::row_bytes(K);
        return bytes;
    }
};

// Returns the bytes of the largest GGUF tile (eight rows) among the GGUF types of the matrix.
__device__ constexpr int largest_tile() {
    constexpr int OF[3] = {OfRange<0>::Of::BYTES, OfRange<1>::Of::BYTES, OfRange<2>::Of::BYTES};
    return OF[0] > OF[1] ? (OF[0] > OF[2] ? OF[0] : OF[2]) : OF[1] > OF[2] ? OF[1] : OF[2];
}

}  // namespace gguf
