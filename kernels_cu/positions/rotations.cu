// RoPE's rotations: row n, at position[n], rotates pair p of channels by the angle position[n] frequencies[p].
//
//   out (N, pairs, 2): cosines and sines. Angles, ROPE_FACTOR and bits are the same as in positions/rope_qkv.cu
//
//   rope_rotations: decoding: cosines and sines, once for all layers
//   rope_rotations_packed: rope_rotations with frequencies per sequence: row n uses the frequencies of sequence row[n]
//
// One thread per rotation. Grid (ceil(N pairs / blockDim.x)), block (any).
#include "lib/overlap.cuh"
#include "lib/rotation.cuh"

// Launched by operation (variant): rotations (rotations)
extern "C" __global__ void rope_rotations(
    const int* position,        // (N)
    const double* frequencies,  // (pairs): radians per position
    float* out,                 // (N, pairs, 2)
    int N, int pairs) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)N * pairs) return;
    const Rotation by = rotation_at(__ldcg(position + i / pairs), frequencies[i % pairs]);
    out[2 * i] = by.cos, out[2 * i + 1] = by.sin;
}

// Launched by operation (variant): rotations (rotations)
extern "C" __global__ void rope_rotations_packed(
    const int* position,        // (N)
    const double* frequencies,  // (B, pairs): radians per position
    const int* row,             // (N)
    float* out,                 // (N, pairs, 2)
    int N, int pairs, int B) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)N * pairs) return;
    const double* const own = frequencies_of(__ldcg(row + i / pairs), frequencies, B, pairs);
    const Rotation by = rotation_at(__ldcg(position + i / pairs), own[i % pairs]);
    out[2 * i] = by.cos, out[2 * i + 1] = by.sin;
}
