// Attention in three kernels, one for each step of the formula: out = softmax(Q K^T / sqrt(HS)) V for each head.
//
//   qkv    (B, T, ROW)      a row is [Q | K | V], each with its heads next to each other: C = NH HS channels of Q, and
//                           NKV HS of K and of V; a head of K and V serves NH / NKV heads of Q
//   scores (B, NH, T, T)    passed from one kernel to the next, T / HS times as large as out. Other variants do not
//                           store all scores: learn/attention/skeleton.cu holds one row of scores,
//                           learn/attention/online.cu one tile
//   out    (B, T, C)
//
// The kernels have the names of llm.c's attention kernels:
//
//   attention_query_key_kernel1, attention_softmax_kernel1, attention_value_kernel1: three kernels: one thread per
//       score, per row, per output; TxT scores in memory. They compute
//       scores[b,h,t,t2] = Q_t . K_t2 / sqrt(HS)
//       exp(score - max) / sum of each row in place
//       out[b,t,h,d] = sum over t2 of scores[b,h,t,t2] V[t2,d]
//
//            t2 ->
//         [ s . . . ]
//     t   [ s s . . ]   causal: query t sees keys 0..t. Later scores are not computed, not written and never read
//     |   [ s s s . ]
//     v   [ s s s s ]
//
// Bottlenecks: in the first kernel, neighbouring threads read rows of K, which are ROW floats apart; in the second
// kernel, they read scores T floats apart. Each load of a warp therefore touches 32 cache lines. In the third kernel,
// neighbouring threads read neighbouring values of V, but each multiply-add needs two loads.
#include "lib/common.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef NKV  // heads of K, and of V
#define NKV NH
#endif
#ifndef HS
#define HS 64
#endif
static_assert(NH > 0 && HS > 0, "a head has at least one channel");

static_assert(NH % NKV == 0, "every head of K serves as many heads of Q");

constexpr int C = NH * HS, ROW = C + 2 * NKV * HS, GROUP = NH / NKV;

// Block (any), grid (B NH T ceil(T / blockDim.x)): the blocks of a row are consecutive.
extern "C" __global__ void attention_query_key_kernel1(
    const float* __restrict__ qkv,  // (B, T, ROW)
    float* __restrict__ scores,     // (B, NH, T, T)
    int T, int causal) {
    const unsigned pieces = (T + blockDim.x - 1) / blockDim.x;
    const long long row = blockIdx.x / pieces;  // (b NH + h) T + t
    const int t = row % T, t2 = blockIdx.x % pieces * blockDim.x + threadIdx.x;
    if (t2 >= (causal ? t + 1 : T)) return;
    const long long head = row / T, first_row = head / NH * T;
    const float* q = qkv + (first_row + t) * ROW + head % NH * HS;
    const float* k = qkv + (first_row + t2) * ROW + C + head % NH / GROUP * HS;
    float sum = 0.0f;
    for (int d = 0; d < HS; ++d) sum += q[d] * k[d];
    scores[row * T + t2] = sum / sqrtf((float)HS);
}

// Block (any), grid (ceil(rows / blockDim.x)).
extern "C" __global__ void attention_softmax_kernel1(
    float* __restrict__ scores,  // (B NH T, T)
    int T, long long rows, int causal) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const int n_keys = causal ? row % T + 1 : T;
    float* p = scores + row * T;
    float max = -INFINITY;
    for (int t2 = 0; t2 < n_keys; ++t2) max = fmaxf(max, p[t2]);
    float sum = 0.0f;
    for (int t2 = 0; t2 < n_keys; ++t2) {
        p[t2] = expf(p[t2] - max);
        sum += p[t2];
    }
    for (int t2 = 0; t2 < n_keys; ++t2) p[t2] /= sum;
}

// Block (any), grid (ceil(outputs / blockDim.x)).
extern "C" __global__ void attention_value_kernel1(
    const float* __restrict__ qkv,     // (B, T, ROW)
    const float* __restrict__ scores,  // (B, NH, T, T), after softmax
    float* __restrict__ out,           // (B, T, C)
    int T, long long outputs, int causal) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= outputs) return;
    const int channel = i % C;  // h HS + d
    const long long b = i / C / T;
    const int t = i / C % T;
    const float* p = scores + ((b * NH + channel / HS) * T + t) * T;
    const int before = channel / HS - channel / HS / GROUP;  // index of this head of Q minus index of its head of V
    const float* v = qkv + b * T * ROW + C + NKV * HS + channel - before * HS;
    const int n_keys = causal ? t + 1 : T;
    float sum = 0.0f;
    for (int t2 = 0; t2 < n_keys; ++t2) sum += p[t2] * v[(long long)t2 * ROW];
    out[i] = sum;
}
