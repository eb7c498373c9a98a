// The rotations of RoPE: row n, at position[n], turns pair k by position[n] frequencies[k].
//
//   out (N, pairs, 2): cosines and sines     angles and ROPE_FACTOR as in llama/rope_qkv.cu, whose bits these are
//
//   rope_rotations: decoding: cosines and sines, once for all layers
//
// One thread for each rotation. Grid (ceil(N pairs / blockDim.x)), block (any).
#include "lib/overlap.cuh"
#include "llama/rotation.cuh"

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
