// RoPE of packed rows [Q | K | V]: rotates the heads of Q and K by the angle of the row's position, and copies V.
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a),   a = positions[n] frequencies[p]   for pair p of a head in row n
//
//   qkv, out (B, N, heads D). If out is qkv, V stays in place, and `moved` (heads written) excludes the heads of V
//
//   rope_qkv: rope_pairs with positions and frequencies in device memory; overlapping launches. See
//       learn/positions/rope.cu
//   rope_packed: rope_qkv with frequencies per sequence: row n uses the frequencies of sequence row[n]
//
// With ROPE_FACTOR, pairs whose frequency is not 0 are multiplied by this factor, as in all RoPE kernels with
// frequencies. With ROPE_GROWTH, the ROPE_QUERIES heads of Q are multiplied by query_factor of lib/rotation.cuh.
//
// A thread processes ROPE_HEADS heads of a row. Storage is T, arithmetic is float. Angles are double until the whole
// turns are subtracted, which makes them accurate at any position.
//
// grid (ceil(N / blockDim.z), ceil(moved / (blockDim.y * ROPE_HEADS)), B), block (ROPE_THREADS, heads, rows).
#include "lib/rope_pairs.cuh"
#include "lib/overlap.cuh"

#ifndef ROPE_QUERIES
#define ROPE_QUERIES 0
#endif

// Rotates rows. sequences: the sequence (0 to B - 1) of each row; null if all rows have the same frequencies.
__device__ __forceinline__ void turn_rows(
    const T* qkv, const int* positions, const double* frequencies, T* out, int N, int turning, int moved, int heads,
    const int* sequences, int B) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * blockDim.z + threadIdx.z;
    const int head = blockIdx.y * blockDim.y * ROPE_HEADS + threadIdx.y;
    if (n >= N) return;
    const long long row = ((long long)blockIdx.z * N + n) * heads * ROPE_D;
    const double position = __ldcg(positions + n);
    if (sequences) frequencies = frequencies_of(__ldcg(sequences + n), frequencies, B, ROPE_D / 2);
    for (int k = threadIdx.x * PAIRS; k < ROPE_D / 2; k += ROPE_THREADS * PAIRS) {
        const long long from = row + (ROPE_HALF_SPLIT ? k : 2 * k);
        Pairs<T> held[ROPE_HEADS];
#pragma unroll
        for (int i = 0; i < ROPE_HEADS; ++i) {
            const int h = head + i * blockDim.y;
            if (h < moved) held[i].load_fresh(qkv + from + (long long)h * ROPE_D);
        }
        Rotation by[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) by[p] = rotation_at(position, frequencies[k + p]);
#pragma unroll
        for (int i = 0; i < ROPE_HEADS; ++i) {
            const int h = head + i * blockDim.y;
            T* const to = out + from + (long long)h * ROPE_D;
            if (h < turning) {
                held[i].turn(by, to, h < ROPE_QUERIES ? query_factor((int)position) : 1.0f);
            } else if (h < moved) {
                held[i].copy(to);
            }
        }
    }
}

// Launched by operation (variant): rope_qkv (rows)
extern "C" __global__ void rope_qkv(
    const T* qkv,               // (B, N, heads D)
    const int* positions,       // (N)
    const double* frequencies,  // (D / 2): radians per position
    T* out,                     // (B, N, heads D)
    int N,
    int turning,                // heads that are rotated: all heads of Q and K
    int moved,                  // heads that are written: all heads, or only the rotated heads
    int heads) {                // heads per row
    turn_rows(qkv, positions, frequencies, out, N, turning, moved, heads, nullptr, 0);
}

// Launched by operation (variant): rope_packed (packed)
extern "C" __global__ void rope_packed(
    const T* qkv,               // (N, heads D)
    const int* positions,       // (N)
    const double* frequencies,  // (B, D / 2): radians per position
    const int* row,             // (N)
    T* out,                     // (N, heads D)
    int N, int turning, int moved, int heads, int B) {
    turn_rows(qkv, positions, frequencies, out, N, turning, moved, heads, row, B);
}
