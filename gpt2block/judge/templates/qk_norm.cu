// QK-Norm: RMSNorm of each head of Q and K in rows [Q | K | V]; V is copied
//
//   out = x / sqrt(mean(x^2) + eps) * gamma over the D channels of a head; gamma_q for Q, gamma_k for K
//
// One thread per head: correct but slow, because neighbouring threads read addresses a head apart.
//   gpt2block kernels qk_norm --mine my.cu
//
// The launch line may use rows, n_head, n_kv_head, heads (n_head + 2 n_kv_head), D and block. T is the
// type of --dtype, float16 by default; see kernels_cu/lib/storage.cuh for widen (to float) and narrow
// (from float).
// launch: grid=ceil(heads / block), rows block=32
#include "lib/storage.cuh"

extern "C" __global__ void my_qk_norm(
    const T* qkv,      // (rows, heads * D): n_head heads of Q, n_kv_head heads of K, n_kv_head heads of V
    const T* gamma_q,  // (D)
    const T* gamma_k,  // (D)
    T* out,            // (rows, heads * D)
    float eps, int n_head, int n_kv_head, int heads, int D) {
    const int head = blockIdx.x * blockDim.x + threadIdx.x;
    if (head >= heads) return;
    const long long first = ((long long)blockIdx.y * heads + head) * D;
    const T* x = qkv + first;
    const T* gamma = head < n_head ? gamma_q : gamma_k;
    const bool is_v = head >= n_head + n_kv_head;

    float squares = 0.0f;
    for (int d = 0; d < D; ++d) squares += widen(x[d]) * widen(x[d]);
    const float scale = rsqrtf(squares / D + eps);

    for (int d = 0; d < D; ++d) out[first + d] = is_v ? x[d] : narrow(widen(x[d]) * scale * widen(gamma[d]));
}
