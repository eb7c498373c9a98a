// Causal attention: out = softmax(Q K^T / sqrt(HS)) V for each head; row i sees keys 0 to i
//
// One thread per element of out: correct but very slow, because every thread computes all scores of
// its row, in two passes.
//   gpt2block kernels attention --mine my.cu
//
// The launch line may use B, T, C, NH, HS (C = NH * HS) and block. T of `const T*` is float; with
// --dtype float16 or bfloat16 it is that type, see kernels_cu/lib/storage.cuh for widen and narrow.
// launch: grid=T, NH, B block=HS
#include "lib/storage.cuh"

__device__ float score(const T* q, const T* k, int HS) {
    float sum = 0.0f;
    for (int d = 0; d < HS; ++d) sum += widen(q[d]) * widen(k[d]);
    return sum / sqrtf((float)HS);
}

extern "C" __global__ void my_attention(
    const T* qkv,  // (B, T, 3C): rows [Q | K | V]; each part has the channels of head 0, head 1, ...
    T* out,        // (B, T, C)
    int seq_len, int n_head, int HS) {
    const int i = blockIdx.x, head = blockIdx.y, d = threadIdx.x, C = n_head * HS;
    const T* rows = qkv + blockIdx.z * (long long)seq_len * 3 * C + head * HS;
    const T* q = rows + (long long)i * 3 * C;

    float largest = score(q, rows + C, HS);
    for (int j = 1; j <= i; ++j) largest = fmaxf(largest, score(q, rows + j * 3LL * C + C, HS));

    float sum = 0.0f, weighted = 0.0f;
    for (int j = 0; j <= i; ++j) {
        const float weight = expf(score(q, rows + j * 3LL * C + C, HS) - largest);
        sum += weight;
        weighted += weight * widen(rows[j * 3LL * C + 2 * C + d]);
    }
    out[(blockIdx.z * (long long)seq_len + i) * C + head * HS + d] = narrow(weighted / sum);
}
