// Attention: out = softmax(q K^T / sqrt(HS)) V for each head.
//
//   mha_causal_kernel, mha_nocausal_kernel: one block per query and head: scores, exp and sum, weighted sum of V. In
//       mha_causal_kernel, query t sees keys 0..t, as in GPT-2, and later keys are never read. In mha_nocausal_kernel,
//       every query sees all seq_len keys, as in LeetGPU's GPT-2 block challenge
//
// A row of qkv is [Q | K | V]. With grouped queries (NKV < NH), K and V have fewer heads than Q; each of their heads
// serves NH / NKV neighbouring heads of Q.
//
// grid (seq_len, NH, B), block (256), dynamic shared memory: seq_len floats, for one row of scores. The GPU's limit of
// opt-in shared memory therefore limits seq_len (about 57,000 on an H200).
//
//   pass 1   scores[j] = q . k_j / sqrt(HS), one thread per key, and their maximum
//   pass 2   scores[j] = exp(scores[j] - max), and their sum
//   pass 3   out[d] = sum_j scores[j] v_j[d] / sum: HS neighbouring threads read a row of V together; the 256 / HS
//            groups of such threads share the keys and add their sums in shared memory at the end
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

constexpr int MHA_BLOCK = 256;
constexpr int C = NH * HS, ROW = C + 2 * NKV * HS;
static_assert(HS <= MHA_BLOCK, "pass 3 needs a thread for every channel of a head: HS <= 256");
static_assert(NH % NKV == 0, "every head of K serves as many heads of Q");

__device__ float dot(const float* q, const float* __restrict__ k) {  // q (HS) in shared memory, k (HS) in global
    float sum = 0.0f;
#if HS % 4 == 0  // then rows of K are aligned to 16 bytes, because qkv is
#pragma unroll 4  // if fully unrolled, q takes 64 registers, fewer blocks fit on an SM: 1.29 times slower
    for (int d = 0; d < HS; d += 4) {
        const float4 k4 = *reinterpret_cast<const float4*>(k + d);
        sum += q[d] * k4.x;
        sum += q[d + 1] * k4.y;
        sum += q[d + 2] * k4.z;
        sum += q[d + 3] * k4.w;
    }
#else
    for (int d = 0; d < HS; ++d) sum += q[d] * k[d];
#endif
    return sum;
}

template <bool CAUSAL>
__device__ void attend(const float* __restrict__ qkv, float* __restrict__ attn_out, int seq_len, float* scores) {
    constexpr int GROUPS = MHA_BLOCK / HS;
    __shared__ float q[HS];
    __shared__ float scratch[MHA_BLOCK];
    const int t = blockIdx.x, head = blockIdx.y, tid = threadIdx.x;
    const long long first_row = (long long)blockIdx.z * seq_len;
    const float* head_q = qkv + first_row * ROW + head * HS;  // (seq_len, ROW), starting at this head's Q
    const float* head_k = head_q + C - (head - head / (NH / NKV)) * HS;
    const float* head_v = head_k + NKV * HS;
    const int n_keys = CAUSAL ? t + 1 : seq_len;

    if (tid < HS) q[tid] = head_q[(long long)t * ROW + tid];
    __syncthreads();

    const float scale = rsqrtf((float)HS);
    float max_score = -INFINITY;
    for (int j = tid; j < n_keys; j += MHA_BLOCK) {
        scores[j] = dot(q, head_k + (long long)j * ROW) * scale;
        max_score = fmaxf(max_score, scores[j]);
    }
    max_score = block_reduce_max<MHA_BLOCK>(max_score, scratch);

    float sum = 0.0f;
    for (int j = tid; j < n_keys; j += MHA_BLOCK) {
        scores[j] = expf(scores[j] - max_score);
        sum += scores[j];
    }
    sum = block_reduce_sum<MHA_BLOCK>(sum, scratch);  // the barriers in this function also make all scores visible

    const int group = tid / HS, d = tid % HS;
    float part = 0.0f;
    if (group < GROUPS) {
#pragma unroll 8
        for (int j = group; j < n_keys; j += GROUPS) part += scores[j] * head_v[(long long)j * ROW + d];
    }
    scratch[tid] = part;
    __syncthreads();
    if (tid < HS) {
        for (int g = 1; g < GROUPS; ++g) part += scratch[g * HS + tid];
        attn_out[(first_row + t) * C + head * HS + tid] = part / sum;
    }
}

extern "C" __global__ void mha_nocausal_kernel(
    const float* __restrict__ qkv,  // (B, seq_len, ROW), a row is [Q | K | V]
    float* __restrict__ attn_out,   // (B, seq_len, C)
    int seq_len) {
    extern __shared__ float scores[];  // (seq_len)
    attend<false>(qkv, attn_out, seq_len, scores);
}

extern "C" __global__ void mha_causal_kernel(
    const float* __restrict__ qkv,  // (B, seq_len, ROW), a row is [Q | K | V]
    float* __restrict__ attn_out,   // (B, seq_len, C)
    int seq_len) {
    extern __shared__ float scores[];  // (seq_len)
    attend<true>(qkv, attn_out, seq_len, scores);
}
