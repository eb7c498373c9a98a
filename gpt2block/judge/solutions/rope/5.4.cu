// Chapter 5, exercise 4: RoPE, a thread rotates the same pair of channels in 8 heads
//
// The angle depends on the position and the pair, not on the head: the heads of a thread share one
// sine and one cosine, in registers. Threads of a warp still have neighbouring pairs of one head.
//   gpt2block kernels rope --mine my.cu
//   gpt2block kernels rope --mine my.cu --dtype float32
//
// launch: grid=ceil(D / 2 / block), ceil(H / 8), T block=64
#include "lib/storage.cuh"

#define HEADS 8  // as in the launch line

extern "C" __global__ void my_rope(
    const T* x,  // (T, H, D)
    T* out,      // (T, H, D)
    int start, float theta, int H, int D) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y * HEADS, t = blockIdx.z;
    if (k >= D / 2) return;
    const double angle = (start + t) / pow((double)theta, 2.0 * k / D);
    const float c = (float)cos(angle), s = (float)sin(angle);

#pragma unroll
    for (int n = 0; n < HEADS; ++n) {
        if (head + n >= H) return;
        const long long first = ((long long)t * H + head + n) * D + 2 * k;
        const float r = widen(x[first]), i = widen(x[first + 1]);
        out[first] = narrow(r * c - i * s);
        out[first + 1] = narrow(r * s + i * c);
    }
}
