// Epilogues of matmul/decode/wgmma.cu, wgmma_rope.cu, wgmma_gguf.cu and wgmma_gguf_rope.cu.
#pragma once
#include "lib/rotation.cuh"
#include "lib/decode/two_outputs.cuh"

constexpr int ORDERED = order::BLOCKS ? 2 : order::WIDTH;  // layout of stored terms (TERM_WIDTH of lib/terms.cuh)

// Version of AddTwo (lib/decode/two_outputs.cuh) that stores out as 16-bit terms, in the layout that the next product
// reads.
struct AddTerms : AddTwo {
    int M;

    __device__ void store(int m, int n, float v, Late) const {
        if (has_low<ORDERED>() || n % 2 == 0) out[term_place<ORDERED>(m, n, M, N)] = v;
    }

    __device__ void store_two(int m, int n, float2 v, LateTwo) const {
        unsigned high, low;
        split_pair<order::KIND>(v.x, v.y, 1.0f, high, low);
        const long long place = term_place<ORDERED>(m, n, M, N);
        out[place] = __int_as_float((int)high);
        if (has_low<ORDERED>()) out[low_place<ORDERED>(place)] = __int_as_float((int)low);
    }
};

// Applies RoPE to q and k, stores q, and appends k and v to the cache. Column n is a pair of channels: channels n % (D
// / 2) and n % (D / 2) + D / 2 of head n / (D / 2). Heads have D channels; the heads of q come first, then the heads of
// k, then the heads of v. late(m, n) loads the rotation and the place in the cache before the sums are complete.
struct RopeAppend {
    static constexpr int D = DH_ROPE ? DH_ROPE : 2;
    static constexpr bool BY_ROW = false;
    struct Late {
        Rotation by;
        long long place;  // row of the cache (B * n_ctx * n_kv_head, D) for the token's head 0; -1: not cached
    };
    const float* rotations;  // (M, D / 2, 2)
    float* q;                // (M, n_head D)
    KV* k_cache;             // (B, n_ctx, n_kv_head D)
    KV* v_cache;
    const int* row;       // (M)
    const int* position;  // (M)
    int n_head, n_kv_head, B, n_ctx;

    __device__ Late late(int m, int n) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
        const float2* by = reinterpret_cast<const float2*>(rotations) + (long long)m * (D / 2) + n % (D / 2);
        const float2 found = n / (D / 2) < n_head + n_kv_head ? __ldcg(by) : float2{1.0f, 0.0f};
        return {{found.x, found.y}, cached ? ((long long)b * n_ctx + at) * n_kv_head : -1};
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
