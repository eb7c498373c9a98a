// Attention in one kernel: out = softmax(Q K^T / sqrt(HS)) V for each head.
//
//   qkv (B, T, ROW)   a row is [Q | K | V], each with its heads next to each other: NH heads of Q, and NKV of K and of
//                     V; a head of K and V serves NH / NKV neighbouring heads of Q
//   out (B, T, C)     C = NH HS
//
//   attention_forward_online: tiles of K and V in shared memory, online softmax, 8x8 per thread; no TxT scores. A block
//       processes many queries and holds one tile of scores at a time, in registers. learn/attention/skeleton.cu holds
//       a row of scores in shared memory, learn/attention/ladder.cu all scores in device memory
//
// Any T. lib/attention/online.cuh describes the algorithm, the tiles and the values in a thread's registers. If HS is a
// multiple of 4, qkv and out are aligned to 16 bytes.
//
// Block (32 AO_WARPS), grid (B NH, ceil(T / QUERIES)), dynamic shared memory: the four arrays at the start of `attend`.
#include "lib/attention/online.cuh"

constexpr int ROW = (NH + 2 * NKV) * HS;  // floats between consecutive rows of a head

// __launch_bounds__ with 1 block: otherwise the compiler spills registers so that more small blocks fit.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward_online(
    const float* __restrict__ qkv,  // (B, T, ROW), a row is [Q | K | V]
    float* __restrict__ out,        // (B, T, C)
    int T, int causal) {            // causal: query t sees keys 0..t, else all keys
    extern __shared__ __align__(16) float tiles[];
    attend<float>(tiles, out, causal, [&](long long b, long long h) -> Task<float> {
        const float* head_q = qkv + b * T * ROW + h * HS;
        const float* head_k = head_q + (NH - (h - h / GROUP)) * HS;
        return {head_q, head_k, head_k + NKV * HS, ROW, ROW, T, 0, T, b * T};
    });
}
