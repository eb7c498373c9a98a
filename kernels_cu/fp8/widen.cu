// Conversion of FP8 to __half: out = w, exactly. The product that reads out applies the scales of w.
//
//   w (size) of type W, E5M2 or E4M3 -> out (size) of type T, which is __half
//
//   widen_fp8: FP8 weights as float16, before a product with float16 activations. A thread converts WIDEN_VECTORS
//       vectors of 16 weights. The weights are loaded before the previous kernel has ended; out is stored after that
//       kernel's end, because until then that kernel may read the old content of out
//
// grid (ceil(size / (16 * WIDEN_VECTORS * block))), any block. size is a multiple of 16; both arrays are aligned to 16
// bytes.
#define STORAGE_FP16 1
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

#ifndef WIDEN_VECTORS
#define WIDEN_VECTORS 2
#endif

// Launched by operation (variant): widen (widen)
extern "C" __global__ void widen_fp8(
    const W* __restrict__ w,  // (size)
    T* out,                   // (size)
    long long size) {
    constexpr int WIDTH = 16;
    const long long step = (long long)blockDim.x * WIDTH;
    const long long first = blockIdx.x * step * WIDEN_VECTORS + (long long)threadIdx.x * WIDTH;
    Vec<W, WIDTH> bytes[WIDEN_VECTORS];
    let_next_start();
#pragma unroll
    for (int i = 0; i < WIDEN_VECTORS; ++i) {
        if (first + i * step < size) bytes[i] = stream_in<Vec<W, WIDTH>>(w + first + i * step);
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < WIDEN_VECTORS; ++i) {
        const long long at = first + i * step;
        if (at >= size) return;
        float v[WIDTH];
        bytes[i].unpack(v);
#pragma unroll
        for (int half = 0; half < WIDTH; half += 8) {
            const float eight[8] = {v[half], v[half + 1], v[half + 2], v[half + 3],
                                    v[half + 4], v[half + 5], v[half + 6], v[half + 7]};
            Vec<T, 8>::store(out + at + half, eight);
        }
    }
}
