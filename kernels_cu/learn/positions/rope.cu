// RoPE, rotary position embedding: rotates every pair of channels of a head by an angle that grows with the position.
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a),   a = (start + t) / theta^(2 k / D)   for pair k of D / 2
//
//   x, out (B, T, H, D), in place if out is x. Pair k is channels 2k and 2k + 1 or, with ROPE_HALF_SPLIT, channels
//   k and k + D / 2. B, T and H may have any strides, so x can be a part of wider rows, such as Q and K in QKV.
//
//   rope_pairs: each thread rotates the same pairs of several heads, which share sines and cosines. A thread processes
//       ROPE_HEADS heads of one position. All loads are issued before the sines and cosines are computed, which hides
//       most of the cost of this computation
//
// The operation is the RoPE of kernl's Llama kernels. Storage is float, __half or __nv_bfloat16; arithmetic is float,
// with angles from lib/rotation.cuh.
//
// grid (ceil(T / blockDim.z), ceil(H / (blockDim.y * ROPE_HEADS)), B), block (ROPE_THREADS, heads, positions).
#include "lib/rope_pairs.cuh"

extern "C" __global__ void rope_pairs(
    const T* x,  // (B, T, H, D), strides x_batch, x_position and x_head
    T* out,      // (B, T, H, D), strides out_batch, out_position and out_head
    long long x_batch, long long out_batch, int x_position, int out_position, int x_head, int out_head, int start,
    float step, float step_low, int positions, int heads) {
    const int t = blockIdx.x * blockDim.z + threadIdx.z;
    const int head = blockIdx.y * blockDim.y * ROPE_HEADS + threadIdx.y;
    if (t >= positions) return;
    x += blockIdx.z * x_batch + (long long)t * x_position;
    for (int k = threadIdx.x * PAIRS; k < ROPE_D / 2; k += ROPE_THREADS * PAIRS) {
        const int channel = ROPE_HALF_SPLIT ? k : 2 * k;
        Pairs<T> held[ROPE_HEADS];
#pragma unroll
        for (int n = 0; n < ROPE_HEADS; ++n) {
            const int h = head + n * blockDim.y;
            if (h < heads) held[n].load_once(x + (long long)h * x_head + channel);
        }
        Rotation by[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) by[p] = {1.0f, 0.0f};
        if (start + t > 0) {  // the angle is 0 at position 0. The branch also keeps the loads before it
            const Pair turns = half_turns(start + t);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) by[p] = rotation(turns, frequency(k + p, step, step_low));
        }
        T* const to = out + blockIdx.z * out_batch + (long long)t * out_position + channel;
#pragma unroll
        for (int n = 0; n < ROPE_HEADS; ++n) {
            const int h = head + n * blockDim.y;
            if (h < heads) held[n].turn(by, to + (long long)h * out_head);
        }
    }
}
