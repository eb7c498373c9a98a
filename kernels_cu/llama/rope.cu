// RoPE, rotary position embedding: rotates every pair of channels of a head by an angle that grows with the position.
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a),   a = (start + t) / theta^(2 k / D)   for pair k of D / 2
//
//   x, out (B, T, H, D), in place if out is x. Pair k is channels 2k and 2k + 1 or, with ROPE_HALF_SPLIT, channels
//   k and k + D / 2. B, T and H may have any strides, so that x can be a part of wider rows: Q and K of a QKV matrix.
//
//   rope_pairs   a thread takes the same pairs of ROPE_HEADS heads of a position. All loads are in flight before sines
//                and cosines are computed, which hides most of their cost, and these are used for all heads
//
// The operation is that of kernl's Llama kernels. Storage is float, __half or __nv_bfloat16; arithmetic is float, with
// angles from llama/rotation.cuh.
//
// grid (ceil(T / blockDim.z), ceil(H / (blockDim.y * ROPE_HEADS)), B), block (ROPE_THREADS, heads, positions).
#include "llama/rotation.cuh"
#include "lib/storage.cuh"

#ifndef ROPE_D
#define ROPE_D 128
#endif
#ifndef ROPE_HALF_SPLIT
#define ROPE_HALF_SPLIT 0
#endif
#ifndef ROPE_WIDTH  // elements per load, a power of two of at most 16 bytes that divides D, or D / 2 with
#define ROPE_WIDTH 4  // ROPE_HALF_SPLIT; x, out and their strides are aligned to a load
#endif
#ifndef ROPE_THREADS  // threads that share a head
#define ROPE_THREADS 32
#endif
#ifndef ROPE_HEADS  // heads per thread
#define ROPE_HEADS 4
#endif

constexpr bool TOGETHER = !ROPE_HALF_SPLIT && ROPE_WIDTH > 1;  // a load holds whole pairs
constexpr int PAIRS = TOGETHER ? ROPE_WIDTH / 2 : ROPE_WIDTH;  // of a thread
constexpr int LOADS = TOGETHER ? 1 : 2;
constexpr int APART = ROPE_HALF_SPLIT ? ROPE_D / 2 : 1;  // distance of the two channels of a pair
static_assert(ROPE_D % 2 == 0, "a head is whole pairs: ROPE_D must be even");
static_assert((ROPE_HALF_SPLIT ? ROPE_D / 2 : ROPE_D) % ROPE_WIDTH == 0, "a head, or half of one, is whole loads");

typedef Vec<T, ROPE_WIDTH> Vector;

struct Pairs {  // pairs of one head, in the storage type
    Vector raw[LOADS];

    __device__ void load(const T* from) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) raw[n] = Vector::load_once(from + n * APART);
    }

    __device__ void turn(const Rotation (&by)[PAIRS], T* to) const {
        float v[LOADS][ROPE_WIDTH];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) raw[n].unpack(v[n]);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            float& real = TOGETHER ? v[0][2 * p] : v[0][p];
            float& imaginary = TOGETHER ? v[0][2 * p + 1] : v[LOADS - 1][p];
            const float r = real, i = imaginary;
            real = r * by[p].cos - i * by[p].sin;
            imaginary = r * by[p].sin + i * by[p].cos;
        }
#pragma unroll
        for (int n = 0; n < LOADS; ++n) Vector::store(to + n * APART, v[n]);
    }
};

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
        Pairs held[ROPE_HEADS];
#pragma unroll
        for (int n = 0; n < ROPE_HEADS; ++n) {
            const int h = head + n * blockDim.y;
            if (h < heads) held[n].load(x + (long long)h * x_head + channel);
        }
        Rotation by[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) by[p] = {1.0f, 0.0f};
        if (start + t > 0) {  // position 0 has angle 0. The branch also keeps the compiler from delaying the loads
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
