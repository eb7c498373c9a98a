// Converts rows of weights in GGUF blocks (lib/gguf.cuh) to numbers.
//
//   w (N, K) in blocks of one or more types; one launch processes a range of rows of one type; K a multiple of 32
//
//   gguf_widen: weights as float16, rounded once, for products of prompts. A warp converts 8 rows by 128 along K
//   gguf_row_norms: squares[n] = sum over k of (w[n, k] gamma[k])^2, which bound the activations of prompts
//   gguf_encoder_rows: out[i] = wte[ids[i]] * GGUF_FACTOR, rows of an embedding. Four lanes read a row, from any tile,
//       so a warp processes 8 tokens
//
// `begin` is the first row of the range, `rows` its number of rows. Lanes 4 g to 4 g + 3 read row g of 8 rows. After
// the last row, and after the end of K, the tiles contain blocks of zeros, whose numbers are not stored.
#define WEIGHT_GGUF 1
#define STORAGE_FP16 1
#include "lib/common.cuh"
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/gguf.cuh"
#include "lib/attention/transpose.cuh"

#ifndef GGUF_TYPE
#define GGUF_TYPE 6
#endif
#ifndef GGUF_FACTOR
#define GGUF_FACTOR 1.0f
#endif

typedef gguf::Part<GGUF_TYPE> Part;

// Calls use(v, k) for each pair of this lane's weights in a unit of 128 along K, except pairs beyond K. k: index of the
// pair's first weight.
template <typename Use>
__device__ __forceinline__ void each_pair(const W* w, int K, int row, int unit, Use use) {
    Part part;
    part.load(w, K, row, unit);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        float2 v[4];
        part.weights(unit, chunk, v);
        const int k = unit * gguf::UNIT + chunk * 32;
#pragma unroll
        for (int i = 0; i < 4 && k < K; ++i) use(v[i], k + 8 * i + threadIdx.x % 4 * 2);
    }
}

// grid (ceil(K / 128), ceil(rows / 8 / warps per block)), block (a multiple of 32)
// Launched by operation (variant): gemm (gguf)
extern "C" __global__ void gguf_widen(
    const W* __restrict__ w,  // tiles of the converted rows
    T* out,                   // (N, K)
    int K, int begin, int rows) {
    let_next_start();
    wait_for_previous();
    const int row_group = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, row = row_group * 8 + threadIdx.x % 32 / 4;
    if (row_group * 8 >= rows) return;
    Part part;
    part.load(w, K, row, blockIdx.x);
    const Part::Factors own = part.factors(blockIdx.x);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        unsigned pairs[4];
        part.halves(chunk, own, pairs);
        turn(pairs, threadIdx.x % 4);  // 16 contiguous bytes, so that four lanes store whole sectors
        const int k = blockIdx.x * gguf::UNIT + chunk * 32 + threadIdx.x % 4 * 8;
        T* const to = out + (long long)(begin + row) * K + k;
        if (row < rows && k < K) *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
}

// grid (ceil(rows / 8)), block (32)
// Launched by operation (variant): to_fp8 (gguf)
extern "C" __global__ void gguf_row_norms(
    const W* __restrict__ w,          // tiles of the converted rows
    const float* __restrict__ gamma,  // (K)
    float* squares,                   // (N)
    int K, int begin, int rows) {
    const int row = blockIdx.x * 8 + threadIdx.x / 4;
    float sum = 0.0f;
    for (int unit = 0; unit * gguf::UNIT < K; ++unit) {
        each_pair(w, K, row, unit, [&](float2 v, int k) {
            const float first = v.x * gamma[k], second = v.y * gamma[k + 1];
            sum += first * first, sum += second * second;
        });
    }
    sum = lanes_sum<4>(sum);
    if (threadIdx.x % 4 == 0 && row < rows) squares[begin + row] = sum;
}

// An id or a position outside its table makes the row NaN, because the host does not read ids and positions back to
// check them. grid (ceil(count / 8), ceil(K / 128)), block (32)
// Launched by operation (variant): encoder_rows (gguf)
extern "C" __global__ void gguf_encoder_rows(
    const int* ids,                 // (count)
    const int* position,            // (count)
    const W* __restrict__ wte,      // (V, K) in blocks of one type
    const float* __restrict__ wpe,  // (n_ctx, K), or null to add nothing
    float* out,                     // (count, K)
    int count, int K, int V, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 8 + threadIdx.x / 4, of = min(i, count - 1);
    const int id = __ldcg(ids + of), at = __ldcg(position + of);
    const bool inside = 0 <= id && id < V && 0 <= at && at < n_ctx;
    const float factor = inside ? GGUF_FACTOR : __int_as_float(0x7fffffff);
    each_pair(wte, K, inside ? id : 0, blockIdx.y, [&](float2 v, int k) {
        if (i >= count) return;
        const float* place = wpe ? wpe + (inside ? (long long)at * K : 0) + k : nullptr;
        float2 y = {v.x * factor, v.y * factor};
        if (place) y.x = place[0] + y.x, y.y = place[1] + y.y;
        *reinterpret_cast<float2*>(out + (long long)i * K + k) = y;
    });
}
