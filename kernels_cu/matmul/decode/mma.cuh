// A block's outputs in matmul/decode/mma.cu and matmul/decode/mma_experts.cu, from loads of weights to the epilogue.
#pragma once
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/cluster.cuh"
#include "lib/decode/mma.cuh"
#include "lib/decode/mma_columns.cuh"
#include "lib/decode/epilogues.cuh"
#include "lib/gate.cuh"
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

#ifndef DECODE_ROWS_FIRST  // 1: the axes of the grid are exchanged
#define DECODE_ROWS_FIRST 0
#endif
#if DECODE_CLUSTER == 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif

// A lane's weights in flight: DECODE_FLIGHT units (128 values of K each) of its columns.
struct Weights {
    uint4 raw[DECODE_FLIGHT][UNIT_CHUNKS][VECTORS];
    const W* w;
    const W* up;  // with DECODE_UP, the matrix of the second half of a block's columns
    const int N;

    __device__ __forceinline__ Weights(const W* w, const W* up, int N) : w(w), up(up), N(N) {}

    // Loads unit `unit` of the DECODE_COLUMNS columns from n on. Weights after these columns, or after K, are zero.
    __device__ __forceinline__ void fetch(int slot, int unit, int n) {
        const int g = threadIdx.x % 32 / 4, k = unit * order::UNIT + threadIdx.x % 4 * order::WIDTH;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int row_group = i / order::PARTS, part = i % order::PARTS;
            const W* const of = DECODE_UP && 8 * row_group >= DECODE_COLUMNS / 2 ? up : w;
            const W* from = of + ((long long)part * N + Column(n + 8 * row_group + g, N).n) * DECODE_K + k;
#pragma unroll
            for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
                raw[slot][chunk][i] = {};
                if (row_group >= ROW_GROUPS) continue;
                if (8 * row_group + 7 >= DECODE_COLUMNS && 8 * row_group + g >= DECODE_COLUMNS) continue;
                if (DECODE_K % order::UNIT && k + chunk * order::CHUNK >= DECODE_K) continue;
                if (SPLITS * LENGTH > DECODE_K && unit * order::UNIT >= DECODE_K) continue;
                typedef Vec<W, order::WIDTH> Vector;
                raw[slot][chunk][i] = stream_in<Vector>(from + chunk * order::CHUNK).raw;
            }
        }
    }

    // Adds the products of a unit of K to the sums of the split that contains the unit.
    __device__ __forceinline__ void use(int slot, int unit, const Input& input, Sums& sums) const {
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Rows x[ROW_TILES];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) input.get(x[r], r, unit, chunk);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4* const first = raw[slot][chunk] + tile * order::TILE_VECTORS;
                const order::Columns columns(first[0], first[order::TILE_VECTORS - 1]);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) order::add_chunk(sums.of[tile][r], columns, x[r]);
            }
        }
    }
};

// Computes a block's outputs; each warp multiplies one split (range of K). totals: shared memory for (SPLITS,
// DECODE_ROWS, DECODE_COLUMNS) floats.
template <typename End>
__device__ __forceinline__ void multiply(const W* w, const W* up, const float* scale, const float* up_scale,
                                         const float* bias, float x_scale, Input& input, const End& end, float* totals,
                                         int N) {
    static_assert(!DECODE_UP || (!DECODE_LOOP && DECODE_COLUMNS % 16 == 0), "half of the columns are whole row_groups");
    constexpr int OUTPUTS = DECODE_ROWS * DECODE_COLUMNS, ENDS = (OUTPUTS + THREADS - 1) / THREADS;
    const int split = threadIdx.x / 32;
    const int start = (DECODE_ROWS_FIRST ? blockIdx.y : blockIdx.x) * DECODE_COLUMNS;
    Weights weights(w, up, N);
#pragma unroll
    for (int i = 0; i < DECODE_FLIGHT; ++i) weights.fetch(i, split * UNITS + i, start);

    struct {
        int m, n;
        bool there;
        float scale, bias, partner_scale, partner_bias, gamma, partner_gamma;
        typename End::Late late;
    } last[ENDS];
#pragma unroll
    for (int i = 0; i < ENDS; ++i) {
        const int flat = i * THREADS + threadIdx.x, m = input.first + flat / DECODE_COLUMNS;
        const Column column(start + flat % DECODE_COLUMNS, N);
        last[i].there = flat < OUTPUTS && m < input.M && column.there;
        if (DECODE_UP && flat % DECODE_COLUMNS >= DECODE_COLUMNS / 2) last[i].there = false;
        if (DECODE_UP) last[i].partner_scale = up_scale ? constant(up_scale + column.n) : 1.0f;
        last[i].m = min(m, input.M - 1), last[i].n = column.n;
        last[i].scale = scale ? constant(scale + last[i].n) : 1.0f;
        last[i].bias = bias ? constant(bias + last[i].n) : 0.0f;
        if constexpr (End::ROTATES) {
            const int partner = end.partner(last[i].n);
            last[i].partner_scale = scale ? constant(scale + partner) : 1.0f;
            last[i].partner_bias = bias ? constant(bias + partner) : 0.0f;
            if (DECODE_QK_NORM) last[i].gamma = constant(end.gamma(last[i].n));
            if (DECODE_QK_NORM) last[i].partner_gamma = constant(end.gamma(partner));
        }
    }
    input.prefetch();
    if (End::ROTATES && DECODE_CLUSTER > 1) arrive_in_cluster();
    let_next_start();
    wait_for_previous();
    input.bring();
#pragma unroll
    for (int i = 0; i < ENDS; ++i) if (last[i].there) last[i].late = end.late(last[i].m, last[i].n);

    Sums sums = {};
#pragma unroll 1
    for (int first = 0; first < UNITS; first += DECODE_FLIGHT) {
#pragma unroll
        for (int i = 0; i < DECODE_FLIGHT; ++i) {
            const int unit = first + i;
            if (UNITS % DECODE_FLIGHT && unit >= UNITS) break;
            weights.use(i, split * UNITS + unit, input, sums);
            if (unit + DECODE_FLIGHT < UNITS) weights.fetch(i, split * UNITS + unit + DECODE_FLIGHT, start);
        }
    }
    Totals of_split = {};
    sums.add_to(of_split);
    each(of_split, [&](int column, int row, float sum) {
        totals[split * OUTPUTS + row * DECODE_COLUMNS + column] = sum;
    });
    __syncthreads();
    const auto total = [&](int flat) {
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < SPLITS; ++p) total += totals[p * OUTPUTS + flat];
        return total;
    };
    const auto finished = [&](int flat, float scale, float bias) {
        return order::finished(total(flat), scale, x_scale, bias);
    };
    if constexpr (End::ROTATES) {
        __shared__ float squares[DECODE_CLUSTER][DECODE_ROWS];
        const HeadSums<HALF, DECODE_CLUSTER, DECODE_ROWS> heads{squares};
        float own[ENDS], other[ENDS];
        if (DECODE_CLUSTER > 1) wait_for_cluster();  // other blocks have started, so their shared memory can be written
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            const int at = i * THREADS + threadIdx.x, flat = min(at, OUTPUTS - 1), column = flat % DECODE_COLUMNS;
            const bool first = column < HALF;
            own[i] = finished(flat, last[i].scale, last[i].bias);
            other[i] = finished(first ? flat + HALF : flat - HALF, last[i].partner_scale, last[i].partner_bias);
            if constexpr (DECODE_QK_NORM) {
                const float real = first ? own[i] : other[i], imaginary = first ? other[i] : own[i];
                heads.give(real, imaginary, column, flat / DECODE_COLUMNS, at < OUTPUTS);
            }
        }
        if (DECODE_QK_NORM) heads.exchange();
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            if (!last[i].there) continue;
            if (DECODE_QK_NORM && end.has_norm(last[i].n)) {
                const float factor = heads.factor((i * THREADS + threadIdx.x) / DECODE_COLUMNS, end.eps);
                own[i] = head_normed(own[i], factor, last[i].gamma);
                other[i] = head_normed(other[i], factor, last[i].partner_gamma);
            }
            const float v = end.rotated(last[i].n, own[i], other[i], last[i].late);
            end.store(last[i].m, last[i].n, v, last[i].late);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ENDS; ++i) {
            if (!last[i].there) continue;
            const int flat = i * THREADS + threadIdx.x;
            float v = finished(flat, last[i].scale, last[i].bias);
            if (DECODE_UP) v = gate_of(v) * finished(flat + DECODE_COLUMNS / 2, last[i].partner_scale, 0.0f);
            end.store(last[i].m, last[i].n, end.value(v, last[i].late), last[i].late);
        }
    }
}

// Computes outputs with DECODE_LOOP: a warp multiplies all splits of DECODE_COLUMNS columns, then all splits of other
// columns.
template <typename End>
__device__ __forceinline__ void multiply_all(const W* w, const float* scale, const float* bias, float x_scale,
                                             Input& input, const End& end, int N) {
    constexpr int ALL = order::units(DECODE_K);
    static_assert(!DECODE_LOOP || ALL % DECODE_FLIGHT == 0, "units in flight are the next ones");
    int start = ((int)blockIdx.x * WARPS + (int)threadIdx.x / 32) * DECODE_COLUMNS;
    Weights weights(w, nullptr, N);
#pragma unroll
    for (int i = 0; i < DECODE_FLIGHT; ++i) weights.fetch(i, i, start);
    let_next_start();
    wait_for_previous();
    input.bring();
    __syncthreads();

    while (start < N) {
        const int next = start + (int)gridDim.x * WARPS * DECODE_COLUMNS;
        Totals totals = {};
        Sums sums = {};
#pragma unroll 1
        for (int first = 0; first < ALL; first += DECODE_FLIGHT) {
#pragma unroll
            for (int i = 0; i < DECODE_FLIGHT; ++i) {
                const int unit = first + i, later = unit + DECODE_FLIGHT;
                weights.use(i, unit, input, sums);
                if (later < ALL) weights.fetch(i, later, start);
                else if (next < N) weights.fetch(i, later - ALL, next);
                if (UNITS == 1 || unit + 1 == ALL || (unit + 1) % UNITS == 0) {
                    sums.add_to(totals);
                    sums = {};
                }
            }
        }
        each(totals, [&](int column, int row, float sum) {
            const int n = start + column, m = input.first + row;
            if (n >= N || m >= input.M) return;
            const float v = order::finished(sum, scale ? scale[n] : 1.0f, x_scale, bias ? bias[n] : 0.0f);
            const typename End::Late late = end.late(m, n);
            end.store(m, n, end.value(v, late), late);
        });
        start = next;
    }
}

template <typename End>
__device__ __forceinline__ void run(const float* x, const float* gamma, const float* beta, float eps, int M, const W* w,
                                    const float* scale, const float* bias, float x_scale, const End& end, int N,
                                    const float* sums = nullptr, const float* sum_scale = nullptr,
                                    const W* up = nullptr, const float* up_scale = nullptr) {
    extern __shared__ float4 shared[];
    char* const rows = reinterpret_cast<char*>(shared);
    const int first = (DECODE_ROWS_FIRST ? blockIdx.x : blockIdx.y) * DECODE_ROWS;
    Input input{x, gamma, beta, eps, M, first, rows, inverse_of(x_scale), sums, sum_scale, {}};
    float* totals = reinterpret_cast<float*>(input.shared + Input::BYTES);
    if constexpr (DECODE_LOOP) multiply_all(w, scale, bias, x_scale, input, end, N);
    else multiply(w, up, scale, up_scale, bias, x_scale, input, end, totals, N);
}
