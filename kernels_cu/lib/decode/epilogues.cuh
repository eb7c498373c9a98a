// Epilogues of the products of decoding: structs that complete and store an output from its sum. EPILOGUE selects the
// epilogue of a kernel of matmul/decode/:
//
//   EPILOGUE_ADD           Add: out = [residual +] [gelu] sum
//   EPILOGUE_ADD_SUMS      AddSums: Add, and the split sums of an earlier product (lib/split_sums.cuh)
//   EPILOGUE_APPEND        Append: stores q in an array, k and v in the KV cache
//   EPILOGUE_APPEND_ROPE   AppendRope: Append after RoPE of q and k
//   EPILOGUE_PEERS         ToPeers: out = [gelu] sum, also sent to other GPUs (lib/exchange.cuh)
//
// late(m, n) loads other data that output (m, n) needs, such as the residual, before the sum is complete. value() then
// receives the scaled sum plus the bias, and store() receives the return value of value(). With ROTATES, rotated()
// takes the place of value().
//
// value() calls activate(), then added(). activate() processes several sums at once, because the instructions for a
// single sum wait for each other. BY_ROW: late(m, n) is the same for all n.
#pragma once
#include "lib/cluster.cuh"
#include "lib/exchange.cuh"
#include "lib/gelu.cuh"
#include "lib/head_norm.cuh"
#include "lib/rotation.cuh"
#include "lib/split_sums.cuh"
#include "lib/storage.cuh"

#define EPILOGUE_ADD 0
#define EPILOGUE_ADD_SUMS 1
#define EPILOGUE_APPEND 2
#define EPILOGUE_APPEND_ROPE 3
#define EPILOGUE_PEERS 4
#ifndef EPILOGUE
#define EPILOGUE EPILOGUE_ADD
#endif

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
    static constexpr bool ROTATES = false, BY_ROW = false;
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

// Version of Add without a residual: also sends the outputs to the other GPUs.
struct ToPeers : Add {
    typedef unsigned Late;  // number of the round
    Peers peers;

    __device__ ToPeers(float* out, int N, int gelu, const Peers& peers) : Add{nullptr, out, N, gelu}, peers(peers) {}

    __device__ Late late(int, int) const { return next_round(peers.own); }
    __device__ float added(float v, Late) const { return v; }
    __device__ float value(float v, Late) const { return Add::value(v, 0.0f); }

    __device__ void store(int m, int n, float v, Late round) const {
        peers.store_outputs<1>(m, n, {v}, round);
        out[(long long)m * N + n] = v;
    }
};

// Version of Add for an incomplete residual: also adds the sums of an earlier product over COUNT splits (ranges of K).
template <int COUNT>
struct AddSums {
    static constexpr bool ROTATES = false;
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

// Row m is the next token of sequence row[m], at position[m]. Its K and V are stored if this place is in the cache.
struct Append {
    static constexpr bool ROTATES = false, BY_ROW = true;
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

// Computes the RMSNorm factors of a head. The BLOCKS blocks of a cluster compute one head for ROWS rows: each block has
// HALF pairs of channels. squares: shared memory of each block, for one sum of squares per block and row.
template <int HALF, int BLOCKS, int ROWS>
struct HeadSums {
    static constexpr int PADDED = BLOCKS > 4 ? 8 : BLOCKS > 2 ? 4 : BLOCKS;
    float (&squares)[BLOCKS][ROWS];

    // Adds the squares of this block's pairs of a row and stores the sum in all blocks of the cluster. Each of HALF
    // neighbouring lanes passes one pair of the row as `first` and `second`. `there`: whether the lane has an output,
    // at (row, column) of the block's tile. All lanes of a warp must call this function.
    __device__ __forceinline__ void give(float first, float second, int column, int row, bool there) const {
        const float sum = neighbours_sum<HALF>(head_square(first, second));
        if (!there || column >= BLOCKS) return;
        float* const here = &squares[BLOCKS > 1 ? rank_in_cluster() : 0][row];
        *(BLOCKS > 1 ? in_block_of_cluster(here, column) : here) = sum;
    }

    // Makes the sums that give() has stored visible in all blocks. All threads call this function once after give().
    __device__ __forceinline__ void exchange() const {
        if constexpr (BLOCKS > 1) release_to_cluster(), acquire_from_cluster();
        else __syncthreads();
    }

    // Returns the factor of the head's RMSNorm for a row of the block's tile, after exchange().
    __device__ __forceinline__ float factor(int row, float eps) const {
        float sums[PADDED] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) sums[block] = squares[block][row];
        return head_factor<2 * HALF * BLOCKS>(neighbours_sum(sums), eps);
    }
};

// Channels c and c + D / 2 of a head of D channels are a pair. rotated() receives the values of both channels of a pair
// and returns the rotated value of the first argument's channel. Results have the bits of positions/rope_append.cu or,
// if q and k are normalised, of positions/qk_norm.cu.
template <int CHANNELS>
struct AppendRope {
    static constexpr bool ROTATES = true;
    static constexpr int D = CHANNELS ? CHANNELS : 2;  // without RoPE (CHANNELS 0): unused
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
    const float* gamma_q;  // (D) or null
    const float* gamma_k;  // (D) or null
    float eps;             // added to the mean square in the RMSNorm of heads

    // Column n is channel n % D of head n / D: the heads of q come first, then the heads of k, then the heads of v.
    __device__ bool has_norm(int n) const { return n / D < n_head + n_kv_head; }
    __device__ const float* gamma(int n) const { return (n / D < n_head ? gamma_q : gamma_k) + n % D; }
    __device__ static int partner(int n) { return n % D < D / 2 ? n + D / 2 : n - D / 2; }

    __device__ Late late(int m, int n) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
        const float2 by = __ldcg(reinterpret_cast<const float2*>(rotations) + (long long)m * (D / 2) + n % (D / 2));
        const float factor = n / D < n_head ? query_factor(at) : 1.0f;
        return {grown({by.x, by.y}, factor), cached ? ((long long)b * n_ctx + at) * n_kv_head : -1};
    }

    __device__ float value(float v, const Late&) const { return v; }  // used without RoPE

    __device__ float rotated(int n, float v, float other, const Late& late) const {
        if (n / D >= n_head + n_kv_head) return v;
        const bool first = n % D < D / 2;
        float real = first ? v : other, imaginary = first ? other : v;
        turn(late.by, real, imaginary);
        return first ? real : imaginary;
    }

    __device__ void store(int m, int n, float v, const Late& late) const {
        const int of_k = n / D - n_head, of_v = of_k - n_kv_head;
        if (of_k < 0) {
            q[(long long)m * n_head * D + n] = v;
        } else if (late.place >= 0) {
            KV* to = of_v < 0 ? k_cache + (late.place + of_k) * D : v_cache + (late.place + of_v) * D;
            to[n % D] = narrowed<KV>(v);
        }
    }
};
