// LayerNorm of few rows before a product.
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of LN_C channels
//
//   layernorm_decode: decoding: one warp per row, with the same bits as the LayerNorm in `linear`; overlapping launches
//
// lib/layernorm.cuh contains the arithmetic. With few rows, the latency of one row matters. Therefore a lane
// issues all its loads at once and keeps its part of the row in registers, if there are at most MAX_HELD loads. Longer
// rows are read again from the L2 cache in each pass. gamma and beta are loaded before the previous kernel has ended
// (lib/overlap.cuh).
//
// All arrays are float. With LN_OPERAND, out holds each value as 16-bit terms (lib/operands.cuh), for a product on
// tensor cores. grid (ceil(N / LN_ROWS)), block (32 * LN_ROWS). The arrays are aligned to LN_X floats.
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/operands.cuh"
#include "lib/layernorm.cuh"

#ifndef LN_C
#define LN_C 768
#endif
#ifndef LN_X  // values per load: gcd(4, LN_C)
#define LN_X 4
#endif
#ifndef LN_ROWS  // rows per block
#define LN_ROWS 1
#endif
#ifndef LN_OPERAND  // format of out: a kind of terms (16-bit parts of floats, lib/operands.cuh); 0: floats
#define LN_OPERAND 0
#endif

constexpr int LOADS = (LN_C + 32 * LN_X - 1) / (32 * LN_X);
constexpr int MAX_HELD = 6;  // maximum number of loads that a lane keeps in registers
constexpr bool HELD = LOADS <= MAX_HELD;
typedef Vec<float, LN_X> Values;
static_assert(!LN_OPERAND || LN_X % 2 == 0, "a lane has whole pairs");

// Launched by operation (variant): layernorm (decode)
extern "C" __global__ void __launch_bounds__(32 * LN_ROWS) layernorm_decode(
    const float* x,                   // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    float* out,                       // (N, C): floats or 16-bit terms
    float out_scale,                  // scale of out, used if LN_OPERAND selects hi/lo terms
    float eps, int N) {
    const int row = blockIdx.x * LN_ROWS + threadIdx.x / 32;
    Values held[HELD ? LOADS : 1], gammas[HELD ? LOADS : 1], betas[HELD ? LOADS : 1];
    if constexpr (HELD) {
        each_of_lane<LN_C, LN_X>([&](int i, int k) {
            gammas[i] = load_parameters<LN_X>(gamma + k), betas[i] = load_parameters<LN_X>(beta + k);
        });
    }
    let_next_start();
    wait_for_previous();
    if (row >= N) return;
    const float* from = x + (long long)row * LN_C;
    if constexpr (HELD) {
        each_of_lane<LN_C, LN_X>([&](int i, int k) { held[i] = load_fresh<float, LN_X>(from + k); });
    }
    const auto read = [&](int i, int k, float (&v)[LN_X]) {
        (HELD ? held[HELD ? i : 0] : load_fresh<float, LN_X>(from + k)).unpack(v);
    };
    const Statistics<LN_C, LN_X> of(eps, read);
    each_of_lane<LN_C, LN_X>([&](int i, int k) {
        float v[LN_X], g[LN_X], b[LN_X];
        read(i, k, v);
        (HELD ? gammas[HELD ? i : 0] : Values::load(gamma + k)).unpack(g);
        (HELD ? betas[HELD ? i : 0] : Values::load(beta + k)).unpack(b);
#pragma unroll
        for (int e = 0; e < LN_X; ++e) v[e] = of.of(v[e], g[e], b[e]);
        if constexpr (LN_OPERAND) {
#pragma unroll
            for (int e = 0; e + 1 < LN_X; e += 2) {
                unsigned high, low;
                split_pair<LN_OPERAND>(v[e], v[e + 1], inverse_of(out_scale), high, low);
                v[e] = __int_as_float((int)high), v[e + 1] = __int_as_float((int)low);
            }
        }
        if constexpr (OPERAND_WIDTH > 0) {
            const long long first = operand_place(row, k, N, LN_C);
#pragma unroll
            for (int e = 0; e + 1 < LN_X; e += 2) {
                const long long high = further_place(first, e);
                out[high] = v[e];
                if (has_low()) out[low_place(high)] = v[e + 1];
            }
        } else {
            Values::store(out + (long long)row * LN_C + k, v);
        }
    });
}
