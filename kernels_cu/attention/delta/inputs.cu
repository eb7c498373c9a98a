// The inputs of the gated delta rule: which tokens a pass computes, and q, k, v, decay and beta of each.
//
//   y_c = silu(sum_n conv[c, n] x_c[t - 3 + n])   n = 0 ... 3, for each channel c of [q | k | v]: a causal convolution
//   q = y / (|y| sqrt(DELTA_K)),  k = y / |y|     for each head of q and k; |y| is sqrt(sum of squares + 1e-6)
//   v = y,  decay = exp(-rate softplus(a + dt_bias)),  beta = sigmoid(b)                          for each head of v
//
// lib/delta.cuh describes the arrays.
//
//   delta_spans: one block finds the first and the last row of each slot, and the state to continue from
//   delta_inputs: one warp per row and head; the first row's warps also compute the rows to repeat
//
// delta_spans: grid (1), block (any). delta_inputs: grid (N, ceil((heads + 1) / 4)), block (32, 4), with n_k_head heads
// of q, as many of k, and H heads of v; the warp after the last head computes decay and beta.
#include "lib/common.cuh"
#include "lib/copies.cuh"
#include "lib/delta.cuh"
#include "lib/overlap.cuh"

// Rows up to which blocks of delta_rule start before this kernel ends. The SMs have no room for all blocks of a longer
// pass at once: blocks that start early then share a few SMs while the others stay empty.
#define DELTA_EARLY 64

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Launched by operation (variant): delta_spans (delta spans)
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

// Computes one head of q, k or v of the token at a position. All rows are requested before the first is used.
template <int SIZE>
__device__ __forceinline__ void head_of(const DeltaRows& of, const float* conv, int position, int begin, bool normed,
                                        float factor, float* out) {
    constexpr int VECTORS = (SIZE / 4 + 31) / 32;  // vectors of four channels per lane
    float taps[VECTORS][4][4], value[VECTORS][4], square = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float* const token = of.channels(position - 3 + n);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int c = 4 * (threadIdx.x + 32 * i);
            const bool reads = token && c < SIZE;
            st_vec(taps[i][n], reads ? __ldcg(reinterpret_cast<const float4*>(token + begin + c)) : float4{});
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int c = 4 * (threadIdx.x + 32 * i);
        if (c >= SIZE) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 weight = ld_vec(conv + 4 * (begin + c + j));
            float sum = fmaf(weight.x, taps[i][0][j], 0.0f);
            sum = fmaf(weight.y, taps[i][1][j], sum);
            sum = fmaf(weight.z, taps[i][2][j], sum);
            sum = fmaf(weight.w, taps[i][3][j], sum);
            value[i][j] = __fmul_rn(sum, sigmoid(sum));
            square = fmaf(value[i][j], value[i][j], square);
        }
    }
    if (normed) factor *= rsqrtf(lanes_sum<32>(square) + 1e-6f);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int c = 4 * (threadIdx.x + 32 * i);
        if (c >= SIZE) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) value[i][j] = __fmul_rn(value[i][j], factor);
        st_vec(out + begin + c, ld_vec(value[i]));
    }
}

// Launched by operation (variant): delta_inputs (delta inputs)
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
    if (N <= DELTA_EARLY) let_next_start();
    wait_for_previous();
    const int n = blockIdx.x, slot = __ldcg(row + n), head = blockIdx.y * blockDim.y + threadIdx.y;
    if (slot < 0 || slot >= B) return;
    const Span span = span_of(spans, slot);
    const int own = span.start + n - span.first;
    if (own >= span.end) return;
    const DeltaRows of = {x, ba, state, recent, W, P, D, H, slot, span};
    const int K = n_k_head * DELTA_K;
    for (int position = n == span.first ? span.base : own; position <= own; ++position) {
        float* const out = rows + (long long)row_of(span, slot, position, N) * (D + 2 * H);
        if (head < 2 * n_k_head) {
            const float factor = head < n_k_head ? rsqrtf((float)DELTA_K) : 1.0f;
            head_of<DELTA_K>(of, conv, position, head * DELTA_K, true, factor, out);
        } else if (head < 2 * n_k_head + H) {
            head_of<DELTA_V>(of, conv, position, 2 * K + (head - 2 * n_k_head) * DELTA_V, false, 1.0f, out);
        } else if (head == 2 * n_k_head + H) {
            const float* const gates = of.gates(position);
            for (int h = threadIdx.x; h < H; h += 32) {
                const float a = __ldcg(gates + H + h) + dt_bias[h];
                const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
                out[D + h] = expf(-__fmul_rn(rate[h], softplus));
                out[D + H + h] = sigmoid(__ldcg(gates + h));
            }
        }
    }
}
