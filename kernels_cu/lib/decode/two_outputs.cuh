// Versions of the epilogues in lib/decode/epilogues.cuh for kernels in which a lane has two neighbouring outputs of a
// row, n and n + 1, with n even. If the addresses are aligned, one memory access covers both outputs. Output n + 1 can
// be after the end of the row.
#pragma once
#include "lib/decode/epilogues.cuh"

struct AddTwo : Add {
    typedef float2 LateTwo;

    __device__ LateTwo late_two(int m, int n) const {
        if (!residual) return {};
        const float* from = residual + (long long)m * N + n;
        if (together()) return __ldcg(reinterpret_cast<const float2*>(from));
        return {__ldcg(from), n + 1 < N ? __ldcg(from + 1) : 0.0f};
    }

    __device__ float2 added_two(float first, float second, LateTwo before) const {
        return {added(first, before.x), added(second, before.y)};
    }

    __device__ void store_two(int m, int n, float2 v, LateTwo) const {
        float* to = out + (long long)m * N + n;
        if (together()) {
            *reinterpret_cast<float2*>(to) = v;
        } else {
            to[0] = v.x;
            if (n + 1 < N) to[1] = v.y;
        }
    }

    __device__ bool together() const {
        return N % 2 == 0 && (reinterpret_cast<size_t>(residual) | reinterpret_cast<size_t>(out)) % 8 == 0;
    }
};

struct AppendTwo : Append {
    struct alignas(2 * sizeof(KV)) Two {
        KV first, second;
    };

    __device__ float2 added_two(float first, float second, Late) const { return {first, second}; }

    __device__ void store_two(int m, int n, float2 v, Late at) const {
        if (!together()) {
            store(m, n, v.x, at);
            if (n + 1 < 3 * C) store(m, n + 1, v.y, at);
        } else if (n < C) {
            *reinterpret_cast<float2*>(q + (long long)m * C + n) = v;
        } else if (at >= 0) {
            KV* cache = n < 2 * C ? k_cache - C : v_cache - 2 * C;
            *reinterpret_cast<Two*>(cache + at * C + n) = {narrowed<KV>(v.x), narrowed<KV>(v.y)};
        }
    }

    __device__ bool together() const {  // whether one access covers both outputs; they are then in one array
        const size_t caches = reinterpret_cast<size_t>(k_cache) | reinterpret_cast<size_t>(v_cache);
        return C % 2 == 0 && reinterpret_cast<size_t>(q) % 8 == 0 && caches % sizeof(Two) == 0;
    }
};
