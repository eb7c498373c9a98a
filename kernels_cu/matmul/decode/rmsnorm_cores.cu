// RMSNorm fused with the product that follows it, for decoding, where all weights are read to process one token:
//
//   rmsnorm_matvec       out = (x * rms * gamma) W, optionally with RoPE on heads of head_dim columns
//   rmsnorm_ffn_matvec   h = x + residual,  n = h * rms * gamma,  out = silu(n W1) * (n W3); or GELU, lib/gate.cuh
//                        rms = 1 / sqrt(mean(x^2) + eps) of each row
//
//   rmsnorm_matvec, rmsnorm_ffn_matvec: few rows: every weight read once, requested before x; the norm's factor at the
//       end. The factor rms is the same for a whole row: x * gamma is multiplied by W while the squares are added, and
//       then the product is scaled by rms
//
// The operations are taken from kernl's Llama kernels. matmul/decode/rmsnorm_cores.cuh has the product and its
// constants. Weight scales and RoPE angles, which the last step needs, are prepared before the product is complete.
//
// W is (N, K) with MV_NK 1, otherwise (K, N). Row m has position start + m % seq_len. With MV_HALF_SPLIT, RoPE rotates
// columns half a head apart instead of neighbouring columns. Any M, N, K.
//
// grid (ceil(pairs / PAIRS), ceil(M / MV_ROWS)), block (MV_THREADS). Dynamic shared memory: MV_ROWS rows of K floats,
// rounded up to a multiple of STEP; for W as (K, N) also one float for each column, row and warp of the block.
#include "matmul/decode/rmsnorm_cores.cuh"
#include "lib/gate.cuh"
#include "lib/rotation.cuh"

#ifndef MV_HALF_SPLIT
#define MV_HALF_SPLIT 0
#endif

// Base of the functors that complete the two products of a pair of columns: they multiply by the row's factor rms and
// by the scales, and store the results.
struct End {
    T* out;        // address of the first output; null if the row does not exist
    int distance;  // distance to the second output; 0 if it does not exist
    const Rows* rows;
    const float* squares;
    float eps, scale_a, scale_b;

    __device__ float factor() const { return rows->factor(squares, eps); }
};

struct Turned : End {
    Rotation turn;

    __device__ void operator()(float a, float b) const {
        if (!out) return;
        a *= factor() * scale_a, b *= factor() * scale_b;
        out[0] = narrow(a * turn.cos - b * turn.sin);
        if (distance) out[distance] = narrow(a * turn.sin + b * turn.cos);
    }
};

struct Gated : End {
    __device__ void operator()(float a, float b) const {
        if (!out) return;
        a *= factor() * scale_a, b *= factor() * scale_b;
        out[0] = narrow(gate_of(a) * b);
    }
};

// grid (ceil(ceil(N / 2) / PAIRS), ceil(M / MV_ROWS)). With MV_HALF_SPLIT and MV_NK 0, STRIP must divide head_dim / 2.
// Launched by operation (variant): rmsnorm_matmul (matvec)
extern "C" __global__ void __launch_bounds__(MV_THREADS) rmsnorm_matvec(
    const T* __restrict__ x,          // (M, K), rows x_stride apart
    const T* __restrict__ gamma,      // (K), or null: no norm, only the product
    const W* __restrict__ w,          // (N, K) or (K, N)
    const float* __restrict__ scale,  // (N) or null
    T* __restrict__ out,              // (M, N)
    float eps, long long x_stride, int M, int N, int K, int seq_len,
    int head_dim,  // 0: no RoPE; divides N
    int start, float step, float step_low) {  // step + step_low = 2 log2(theta) / head_dim
    extern __shared__ float4 shared[];
    __shared__ float squares[MV_ROWS][WARPS];
    const Rows rows = {x, nullptr, gamma, nullptr, x_stride, M, K, (int)blockIdx.y * MV_ROWS};
    const int half = head_dim / 2;
    const auto columns = [&](int pair) {
        if (!MV_HALF_SPLIT) return int2{2 * pair, 2 * pair + 1};
        const int n = pair / half * head_dim + pair % half;
        return int2{n, n + half};
    };
    multiply<Turned>(w, w, rows, N, (N + 1) / 2, shared, squares, columns, [&](int2 n, int r) {
        const int m = rows.first + r;
        const bool both = n.y < N;
        Turned end;
        end.out = m < M ? out + (long long)m * N + n.x : nullptr;
        end.distance = both ? n.y - n.x : 0;
        end.rows = &rows, end.squares = squares[r], end.eps = eps;
        end.scale_a = scale ? scale[n.x] : 1.0f;
        end.scale_b = scale && both ? scale[n.y] : 1.0f;
        end.turn = {1.0f, 0.0f};
        if (head_dim) {
            const int k = MV_HALF_SPLIT ? n.x % head_dim : n.x % head_dim / 2;
            end.turn = rotation(half_turns(start + m % seq_len), frequency(k, step, step_low));
        }
        return end;
    });
}

// grid (ceil(N / PAIRS), ceil(M / MV_ROWS)). With W1 and W3 as (K, N), MV_STRIPS must be 2.
// Launched by operation (variant): rmsnorm_ffn (matvec)
extern "C" __global__ void __launch_bounds__(MV_THREADS) rmsnorm_ffn_matvec(
    const T* __restrict__ x,           // (M, K), rows x_stride apart
    const T* __restrict__ residual,    // (M, K) or null
    T* __restrict__ sum,               // (M, K): x + residual, or null
    const T* __restrict__ gamma,       // (K)
    const W* __restrict__ w1,          // (N, K) or (K, N)
    const float* __restrict__ scale1,  // (N) or null
    const W* __restrict__ w3,          // same shape as w1
    const float* __restrict__ scale3,  // (N) or null
    T* __restrict__ out,               // (M, N)
    float eps, long long x_stride, int M, int N, int K) {
    extern __shared__ float4 shared[];
    __shared__ float squares[MV_ROWS][WARPS];
    const Rows rows = {x, residual, gamma, sum, x_stride, M, K, (int)blockIdx.y * MV_ROWS};
    const auto columns = [](int pair) { return int2{pair, pair}; };
    multiply<Gated>(w1, w3, rows, N, N, shared, squares, columns, [&](int2 n, int r) {
        const int m = rows.first + r;
        Gated end;
        end.out = m < M ? out + (long long)m * N + n.x : nullptr;
        end.distance = 0;
        end.rows = &rows, end.squares = squares[r], end.eps = eps;
        end.scale_a = scale1 ? scale1[n.x] : 1.0f;
        end.scale_b = scale3 ? scale3[n.x] : 1.0f;
        return end;
    });
}
