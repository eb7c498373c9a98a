// The inputs of the gated delta rule: which tokens a pass computes, and q, k, v, decay and beta of each.
//
//   y_c = silu(sum_n conv[c, n] x_c[t - 3 + n])   n = 0 ... 3, for each channel c of [q | k | v]: a causal convolution
//   q = y / (|y| sqrt(DELTA_K)),  k = y / |y|     for each head of q and k; |y| is sqrt(sum of squares + 1e-6)
//   v = y,  decay = exp(-rate softplus(a + dt_bias)),  beta = sigmoid(b)                          for each head of v
//
// lib/delta.cuh describes the arrays.
//
//   delta_spans: one block finds the first and the last row of each slot, and the state to continue from
//   delta_inputs: one warp per DELTA_TOKENS rows and head, which reads the rows of neighbours once if they follow each
//       other; the first row's warps also compute the rows to repeat
//
// delta_spans: grid (1), block (any). delta_inputs: grid (ceil(N / DELTA_TOKENS), ceil((heads + 1) / 4)), block (32, 4),
// with n_k_head heads of q, as many of k, and H heads of v; the warp after the last head computes decay and beta.
#include "lib/common.cuh"
#include "lib/copies.cuh"
#include "lib/delta.cuh"
#include "lib/overlap.cuh"

#ifndef DELTA_K  // channels of a head of q and k
#define DELTA_K 128
#endif
#ifndef DELTA_V  // channels of a head of v
#define DELTA_V 128
#endif
#ifndef DELTA_TOKENS  // rows of a warp
#define DELTA_TOKENS 1
#endif

constexpr int LARGER = DELTA_K > DELTA_V ? DELTA_K : DELTA_V;
constexpr int VALUES = (LARGER + 31) / 32;  // channels of a head per lane

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void delta_spans(
    const int* row,        // (N): slot of each row; rows of other slots than 0 ... B - 1 are not computed
    const int* positions,  // (N); rows of negative positions are not computed
    int* held,             // (B, 2): number of tokens of the two states of a slot, or -1
    int* spans,            // (B, 6)
    int N, int B, int steps) {
    let_next_start();
    wait_for_previous();
    for (int i = threadIdx.x; i < 6 * B; i += blockDim.x) spans[i] = 0;
    __syncthreads();
    for (int n = threadIdx.x; n < N; n += blockDim.x) {
        const int slot = __ldcg(row + n), at = __ldcg(positions + n);
        if (slot < 0 || slot >= B || at < 0) continue;
        if (n == 0 || __ldcg(row + n - 1) != slot) {
            spans[6 * slot] = n;
            spans[6 * slot + 1] = at;
        }
        if (n == N - 1 || __ldcg(row + n + 1) != slot || __ldcg(positions + n + 1) < 0) spans[6 * slot + 2] = at + 1;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < B; slot += blockDim.x) {
        int* const own = spans + 6 * slot;
        int* const states = held + 2 * slot;
        const int start = own[1], end = own[2];
        if (start == end) continue;
        const bool first = states[0] >= 0 && states[0] <= start, second = states[1] >= 0 && states[1] <= start;
        int source = -1;
        if (start > 0) source = second && (!first || states[1] > states[0]) ? 1 : first ? 0 : -2;
        int base = source >= 0 ? states[source] : start;
        if (start - base > DELTA_REPLAYED) {
            source = -2;
            base = start;
        }
        const int target = source < 0 ? 0 : 1 - source;
        own[3] = base;
        own[4] = source;
        own[5] = target;
        states[1 - target] = source < 0 ? -1 : base;
        states[target] = source == -2 ? -1 : steps ? start + 1 : end;
    }
}

// Computes a head of q, k or v of the tokens at COUNT positions. All rows are requested before the first is used.
template <int SIZE, int COUNT>
__device__ __forceinline__ void head_of(const DeltaRows& of, const float* conv, int position, int begin, bool normed,
                                        float scale, float* out) {
    float taps[COUNT + 3][VALUES];
#pragma unroll
    for (int n = 0; n < COUNT + 3; ++n) {
        const float* const token = of.channels(position - 3 + n);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int c = threadIdx.x + 32 * i;
            taps[n][i] = token && c < SIZE ? __ldcg(token + begin + c) : 0.0f;
        }
    }
    float4 weight[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const int c = threadIdx.x + 32 * i;
        weight[i] = c < SIZE ? ld_vec(conv + 4 * (begin + c)) : float4{};
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        float value[VALUES], square = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            float sum = fmaf(weight[i].x, taps[n][i], 0.0f);
            sum = fmaf(weight[i].y, taps[n + 1][i], sum);
            sum = fmaf(weight[i].z, taps[n + 2][i], sum);
            sum = fmaf(weight[i].w, taps[n + 3][i], sum);
            value[i] = __fmul_rn(sum, sigmoid(sum));
            square = fmaf(value[i], value[i], square);
        }
        const float factor = normed ? scale * rsqrtf(lanes_sum<32>(square) + 1e-6f) : 1.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int c = threadIdx.x + 32 * i;
            if (c < SIZE) out[(long long)n * (of.D + 2 * of.H) + begin + c] = __fmul_rn(value[i], factor);
        }
    }
}

// Computes a head, or decay and beta, of the tokens at COUNT positions. out: the row of the first of them.
template <int COUNT>
__device__ __forceinline__ void tokens_of(const DeltaRows& of, const float* conv, const float* rate, const float* dt_bias,
                                          int n_k_head, int head, int position, float* out) {
    const int D = of.D, H = of.H, heads = 2 * n_k_head;
    if (head < heads) {
        const float scale = head < n_k_head ? rsqrtf((float)DELTA_K) : 1.0f;
        head_of<DELTA_K, COUNT>(of, conv, position, head * DELTA_K, true, scale, out);
    } else if (head < heads + H) {
        head_of<DELTA_V, COUNT>(of, conv, position, heads * DELTA_K + (head - heads) * DELTA_V, false, 1.0f, out);
    } else if (head == heads + H) {
        for (int n = 0; n < COUNT; ++n, out += D + 2 * H) {
            const float* const gates = of.gates(position + n);
            for (int h = threadIdx.x; h < H; h += 32) {
                const float a = __ldcg(gates + H + h) + dt_bias[h];
                const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
                out[D + h] = expf(-__fmul_rn(rate[h], softplus));
                out[D + H + h] = sigmoid(__ldcg(gates + h));
            }
        }
    }
}

extern "C" __global__ void delta_inputs(
    const float* x,        // (N, W)
    const float* ba,       // (N, 2 H)
    const float* conv,     // (D, 4)
    const float* rate,     // (H)
    const float* dt_bias,  // (H)
    const int* row,        // (N)
    const int* spans,      // (B, 6)
    const float* state,    // (B, 2, P); or null: all sequences begin
    const float* recent,   // (B, 16, D + 2 H); or null
    float* rows,           // (N + 7 B, D + 2 H)
    long long W, long long P, int D, int H, int n_k_head, int N, int B) {
    let_next_start();
    wait_for_previous();
    const int head = blockIdx.y * blockDim.y + threadIdx.y, Y = D + 2 * H;
    for (int n = blockIdx.x * DELTA_TOKENS, last = min(n + DELTA_TOKENS, N); n < last; ++n) {
        const int slot = __ldcg(row + n);
        if (slot < 0 || slot >= B) continue;
        const Span span = span_of(spans, slot);
        const int own = span.start + n - span.first;
        if (own >= span.end) continue;
        const DeltaRows of = {x, ba, state, recent, W, P, D, H, slot, span};
        const bool begins = n == span.first && span.base < span.start;  // there are rows to repeat
        if (DELTA_TOKENS > 1 && !begins && n % DELTA_TOKENS == 0 && own + DELTA_TOKENS <= span.end) {
            tokens_of<DELTA_TOKENS>(of, conv, rate, dt_bias, n_k_head, head, own, rows + (long long)n * Y);
            return;
        }
        for (int position = begins ? span.base : own; position <= own; ++position)
            tokens_of<1>(of, conv, rate, dt_bias, n_k_head, head, position, rows + row_of(span, slot, position, N) * Y);
    }
}
