// Epilogues of matrix products for decoding: structs that complete and store an output from its sum. late(m, n) loads
// other data that output (m, n) needs, such as the residual, before the sum is complete. value() then receives the
// scaled sum plus the bias, and store() receives the return value of value(). TURNED: the epilogue processes pairs of
// channels, see lib/decode/rope_epilogue.cuh.
//
// value() calls activate(), then added(). activate() processes several sums at once, because the instructions for a
// single sum wait for each other. BY_ROW: late(m, n) is the same for all n.
#pragma once
#include "lib/gelu.cuh"
#include "lib/storage.cuh"
#include "lib/decode/split_sums.cuh"

// Loads a constant. Inline assembly keeps the compiler from moving the load after the wait for the previous kernel.
__device__ __forceinline__ float constant(const float* from) {
#if defined(__CUDA_ARCH__)
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
#else
    return *from;
#endif
}

struct Add {
    static constexpr bool TURNED = false, BY_ROW = false;
    typedef float Late;
    const float* residual;  // (M, N) or null; may be out
    float* out;             // (M, N)
    int N, with_gelu;

    __device__ Late late(int m, int n) const { return residual ? __ldcg(residual + (long long)m * N + n) : 0.0f; }

    template <int COUNT>
    __device__ __forceinline__ void activate(float (&v)[COUNT]) const {
        if (with_gelu) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) v[i] = gelu(v[i]);
        }
    }

    __device__ float added(float v, Late before) const { return residual ? before + v : v; }

    __device__ float value(float v, Late before) const {
        float one[1] = {v};
        activate(one);
        return added(one[0], before);
    }

    __device__ void store(int m, int n, float v, Late) const { out[(long long)m * N + n] = v; }
};

// Version of Add for an incomplete residual: also adds the sums of an earlier product over COUNT splits (ranges of K).
template <int COUNT>
struct AddSums {
    static constexpr bool TURNED = false;
    struct Late {
        float residual;
        SplitSums<COUNT, 1> sums;
    };
    const float* residual;  // (M, N); may be out
    const float* sums;      // (COUNT, M, N)
    const float* scale;     // (N) or null
    float* out;             // (M, N)
    int M, N;

    __device__ Late late(int m, int n) const {
        const long long at = (long long)m * N + n;
        Late found;
        found.residual = __ldcg(residual + at);
        found.sums.load(sums + at, (long long)M * N, scale ? scale + n : nullptr);
        return found;
    }

    __device__ float value(float v, const Late& before) const {
        return before.sums.added_to(before.residual, 0) + v;
    }

    __device__ void store(int m, int n, float v, const Late&) const { out[(long long)m * N + n] = v; }
};

struct Append {
    static constexpr bool TURNED = false, BY_ROW = true;
    typedef long long Late;  // row of the cache (B * n_ctx, C) for the token; -1: not cached
    float* q;     // (M, C)
    KV* k_cache;  // (B, n_ctx, C)
    KV* v_cache;
    const int* row;       // (M)
    const int* position;  // (M)
    int C, B, n_ctx;

    __device__ Late late(int m, int) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        return b >= 0 && b < B && at >= 0 && at < n_ctx ? (long long)b * n_ctx + at : -1;
    }

    template <int COUNT>
    __device__ void activate(float (&)[COUNT]) const {}

    __device__ float added(float v, Late) const { return v; }
    __device__ float value(float v, Late) const { return v; }

    __device__ void store(int m, int n, float v, Late at) const {
        if (n < C) {
            q[(long long)m * C + n] = v;
        } else if (at >= 0) {
            KV* cache = n < 2 * C ? k_cache - C : v_cache - 2 * C;
            cache[at * C + n] = narrowed<KV>(v);
        }
    }
};
