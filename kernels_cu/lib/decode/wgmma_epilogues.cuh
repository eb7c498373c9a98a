// Epilogues of matmul/decode/wgmma.cu and wgmma_gguf.cu (interface: lib/decode/epilogues.cuh). A lane has two
// neighbouring outputs of a row, n and n + 1, with n even. If the addresses are aligned, one memory access covers both
// outputs. Output n + 1 can be after the end of the row.
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

// N is even, and out is aligned to 8 bytes.
struct TwoToPeers : ToPeers {
    typedef Late LateTwo;
    using ToPeers::ToPeers;

    __device__ LateTwo late_two(int m, int n) const { return late(m, n); }
    __device__ float2 added_two(float first, float second, LateTwo) const { return {first, second}; }

    __device__ void store_two(int m, int n, float2 v, LateTwo round) const {
        peers.store_outputs<2>(m, n, {v.x, v.y}, round);
        *reinterpret_cast<float2*>(out + (long long)m * N + n) = v;
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

constexpr int ORDERED = order::BLOCKS ? 2 : order::WIDTH;  // order of out's terms: see OPERAND_WIDTH, lib/operands.cuh

// Version of AddTwo that stores out as 16-bit terms, in the layout that the next product reads.
struct AddOperand : AddTwo {
    int M;

    __device__ void store(int m, int n, float v, Late) const {
        if (has_low<ORDERED>() || n % 2 == 0) out[operand_place<ORDERED>(m, n, M, N)] = v;
    }

    __device__ void store_two(int m, int n, float2 v, LateTwo) const {
        store_term_pair<order::KIND, ORDERED>(out, v.x, v.y, 1.0f, m, n, M, N);
    }
};

// Version of AppendRope for lanes that have both sums of a pair. Column n is a pair of channels: channels n % (D / 2)
// and n % (D / 2) + D / 2 of head n / (D / 2); the heads of q come first, then the heads of k, then the heads of v.
struct AppendRopeTwo : AppendRope<DECODE_ROPE> {
    static constexpr bool BY_ROW = false;

    __device__ Late late(int m, int n) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
        const float2* by = reinterpret_cast<const float2*>(rotations) + (long long)m * (D / 2) + n % (D / 2);
        const float2 found = n / (D / 2) < n_head + n_kv_head ? __ldcg(by) : float2{1.0f, 0.0f};
        const float factor = n / (D / 2) < n_head ? query_factor(at) : 1.0f;
        return {grown({found.x, found.y}, factor), cached ? ((long long)b * n_ctx + at) * n_kv_head : -1};
    }

    __device__ void store_pair(int m, int n, float first, float second, const Late& late) const {
        const int head = n / (D / 2), channel = n % (D / 2), of_k = head - n_head, of_v = of_k - n_kv_head;
        if (of_v < 0) turn(late.by, first, second);
        if (of_k < 0) {
            float* to = q + ((long long)m * n_head + head) * D + channel;
            to[0] = first, to[D / 2] = second;
        } else if (late.place >= 0) {
            KV* to = (of_v < 0 ? k_cache + (late.place + of_k) * D : v_cache + (late.place + of_v) * D) + channel;
            to[0] = narrowed<KV>(first), to[D / 2] = narrowed<KV>(second);
        }
    }
};
