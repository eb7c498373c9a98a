// Epilogue of the product of q, k and v in decoding with RoPE (interface: lib/decode/epilogues.cuh). Channels c and c +
// D / 2 of a head of D channels are a pair. turned() receives the values of both channels of a pair and returns the
// rotated value of the first argument's channel. Results have the bits of positions/rope_append.cu or, if q and k are
// normalised, of positions/qk_norm.cu.
#pragma once
#include "lib/cluster.cuh"
#include "lib/storage.cuh"
#include "lib/head_norm.cuh"
#include "lib/rotation.cuh"

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

    __device__ __forceinline__ float factor(int row, float eps) const {
        float sums[PADDED] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) sums[block] = squares[block][row];
        return head_factor<2 * HALF * BLOCKS>(neighbours_sum(sums), eps);
    }
};

template <int CHANNELS>
struct AppendTurned {
    static constexpr bool TURNED = true;
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

    __device__ bool has_norm(int n) const { return n / D < n_head + n_kv_head; }
    __device__ const float* gamma(int n) const { return (n / D < n_head ? gamma_q : gamma_k) + n % D; }
    __device__ static int partner(int n) { return n % D < D / 2 ? n + D / 2 : n - D / 2; }

    __device__ Late late(int m, int n) const {
        const int b = __ldcg(row + m), at = __ldcg(position + m);
        const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
        const float2 by = __ldcg(reinterpret_cast<const float2*>(rotations) + (long long)m * (D / 2) + n % (D / 2));
        return {{by.x, by.y}, cached ? ((long long)b * n_ctx + at) * n_kv_head : -1};
    }

    __device__ float value(float v, const Late&) const { return v; }  // used without RoPE

    __device__ float turned(int n, float v, float other, const Late& late) const {
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
