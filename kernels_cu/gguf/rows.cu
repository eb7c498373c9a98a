// Rows of weights that are in blocks of GGUF (lib/gguf.cuh), as numbers.
//
//   w (N, K) in blocks of one type or more, given one after the other; K a multiple of 32
//
//   gguf_widen: a weight as float16, rounded once, for products of prompts. A warp has 8 rows by 128 of K
//   gguf_row_norms: squares[n] = sum over k of (w[n, k] gamma[k])^2, from which a prompt's bounds follow
//   gguf_encoder_rows: out[i] = wte[ids[i]] * GGUF_FACTOR, rows of an embedding. The four lanes of a row take it from
//       any tile, so a warp has 8 tokens
//
// A range of rows has one type: begin and rows say which of N they are. Lanes 4 g + t have row g: at the end of the
// rows, or of K, their blocks are zeros, which are not stored.
#ifndef WEIGHT_GGUF
#define WEIGHT_GGUF
#endif
#ifndef STORAGE_FP16
#define STORAGE_FP16
#endif
#include "lib/common.cuh"
#include "lib/overlap.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/gguf.cuh"

#ifndef GGUF_TYPE
#define GGUF_TYPE 6
#endif
#ifndef GGUF_FACTOR
#define GGUF_FACTOR 1.0f
#endif

typedef gguf::Part<GGUF_TYPE> Part;

// Calls use(v, k, next) for each eight weights of this lane in 128 of K, four from k on and four from next on, that
// are not beyond K.
template <typename Use>
__device__ __forceinline__ void each_eight(const W* w, int K, int row, int unit, Use use) {
    Part part;
    part.load(w, K, row, unit);
    const Part::Own own = part.own(unit);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        float v[8];
        int k, next;
        part.weights(unit, chunk, own, v, k, next);
        if (unit * gguf::UNIT + chunk * 32 < K) use(v, k, next);
    }
}

// grid (ceil(K / 128), ceil(rows / 8 / warps of a block)), block (a multiple of 32)
extern "C" __global__ void gguf_widen(
    const W* __restrict__ w,  // of the range
    T* out,                   // (N, K)
    int K, int begin, int rows) {
    let_next_start();
    wait_for_previous();
    const int octet = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, row = octet * 8 + threadIdx.x % 32 / 4;
    if (octet * 8 >= rows) return;
    each_eight(w, K, row, blockIdx.x, [&](const float (&v)[8], int k, int next) {
        if (row >= rows) return;
        T* to = out + (long long)(begin + row) * K;
        const float first[4] = {v[0], v[1], v[2], v[3]}, second[4] = {v[4], v[5], v[6], v[7]};
        Vec<T, 4>::store(to + k, first);
        Vec<T, 4>::store(to + next, second);
    });
}

// grid (ceil(rows / 8)), block (32)
extern "C" __global__ void gguf_row_norms(
    const W* __restrict__ w,          // of the range
    const float* __restrict__ gamma,  // (K)
    float* squares,                   // (N)
    int K, int begin, int rows) {
    const int row = blockIdx.x * 8 + threadIdx.x / 4;
    float sum = 0.0f;
    for (int unit = 0; unit * gguf::UNIT < K; ++unit) {
        each_eight(w, K, row, unit, [&](const float (&v)[8], int k, int next) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float y = v[i] * gamma[i < 4 ? k + i : next + i - 4];
                sum += y * y;
            }
        });
    }
    sum = lanes_sum<4>(sum);
    if (threadIdx.x % 4 == 0 && row < rows) squares[begin + row] = sum;
}

// ids and positions are not read back: one that is outside its table makes its row NaN. grid (ceil(count / 8),
// ceil(K / 128)), block (32)
extern "C" __global__ void gguf_encoder_rows(
    const int* ids,                 // (count)
    const int* position,            // (count)
    const W* __restrict__ wte,      // (V, K) in blocks of one type
    const float* __restrict__ wpe,  // (n_ctx, K), or null: rows of wte alone
    float* out,                     // (count, K)
    int count, int K, int V, int n_ctx) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * 8 + threadIdx.x / 4, of = min(i, count - 1);
    const int id = __ldcg(ids + of), at = __ldcg(position + of);
    const bool inside = 0 <= id && id < V && 0 <= at && at < n_ctx;
    const float factor = inside ? GGUF_FACTOR : __int_as_float(0x7fffffff);
    each_eight(wte, K, inside ? id : 0, blockIdx.y, [&](const float (&v)[8], int k, int next) {
        if (i >= count) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* to = out + (long long)i * K + (half ? next : k);
            const float* place = wpe ? wpe + (inside ? (long long)at * K : 0) + (half ? next : k) : nullptr;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float y = v[4 * half + e] * factor;
                to[e] = place ? place[e] + y : y;
            }
        }
    });
}
