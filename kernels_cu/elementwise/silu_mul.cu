// The gate of Llama's feed-forward: out = gate * up / (1 + exp(-gate)), element by element.
//
//   gate, up, out   (n) elements of T: float, __half or __nv_bfloat16; arithmetic is float
//
// In a whole model this kernel follows the products, whose order of additions must not depend on the number of rows. In
// a single block, matmul/decode/rmsnorm_cores.cu and its variants fuse the gate into the product. With GATE_GELU, all
// these kernels compute GELU(gate) up instead (lib/gate.cuh).
//
//   silu_mul: one thread per vector; launches may overlap. Vectors have SM_WIDTH elements
//   gated_columns: `up` is a range of columns of float rows, and gate and out have only these columns
//
// Grid (ceil(n / (SM_WIDTH * block))), block (any).
#include "lib/fresh.cuh"
#include "lib/gate.cuh"
#include "lib/overlap.cuh"

#ifndef SM_WIDTH  // elements per vector, a divisor of n; arrays are aligned to a vector of at most 16 bytes
#define SM_WIDTH 4
#endif

// Stores the activation of a vector of gates times a vector of `up`.
template <typename E, int WIDTH>
__device__ __forceinline__ void store_gated(E* out, const E* gate, const E* up) {
    float g[WIDTH], u[WIDTH];
    load_fresh<E, WIDTH>(gate).unpack(g);
    load_fresh<E, WIDTH>(up).unpack(u);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) g[k] = gate_of(g[k]) * u[k];
    Vec<E, WIDTH>::store(out, g);
}

// Launched by operation (variant): silu_mul (silu_mul)
extern "C" __global__ void silu_mul(const T* gate,  // (n)
                                    const T* up,    // (n)
                                    T* out,         // (n); may be gate or up
                                    long long n) {
    let_next_start();
    wait_for_previous();
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * SM_WIDTH;
    if (i < n) store_gated<T, SM_WIDTH>(out + i, gate + i, up + i);
}

constexpr int FLOATS = SM_WIDTH < 4 ? SM_WIDTH : 4;  // elements per vector of floats

// Launched by operation (variant): gated_columns (columns)
extern "C" __global__ void gated_columns(
    const float* gate,  // (N, P)
    const float* rows,  // (N, W)
    float* out,         // (N, P); may be gate
    int first,          // the first of P columns of rows
    int P, int W,
    long long n) {  // N P
    let_next_start();
    wait_for_previous();
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * FLOATS;
    if (i < n) store_gated<float, FLOATS>(out + i, gate + i, rows + i / P * W + first + i % P);
}
