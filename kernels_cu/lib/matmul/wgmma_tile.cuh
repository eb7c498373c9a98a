// Steps of a GEMM with 16-bit inputs for Hopper, for one consumer warpgroup (group): the products of a tile, the
// exchange and addition of sums over several splits of K, and the stores. Included by matmul/prompt/wgmma.cu and
// matmul/prompt/rmsnorm_wgmma.cu; based on lib/matmul/wgmma.cuh.
#pragma once

#include "lib/storage.cuh"
#include "lib/matmul/wgmma_chunks.cuh"

constexpr int BOX_BYTES = SLICE * ROW_BYTES;  // bytes of a box of 64 columns of w (K, N)

static_assert(GEMM_SPLITS == 1 || GROUPS == CONSUMERS, "a split tile is for both groups");

typedef float Sums[BLOCKS_M][GEMM_GROUP_N / 2];  // a thread's sums
typedef float Finals[BLOCKS_M][PART_N / 2];      // a thread's sums over all splits, for its group's columns

// Computes the sums of a tile from the slices in the ring buffer, from slice `count` on. ACROSS: w is stored as (K, N).
template <bool ACROSS = false>
__device__ __forceinline__ void multiply_tile(Sums& sums, const char* ring, Barriers& barriers, const Group& group,
                                              unsigned count, int slices) {
    for (int k = 0; k < slices; ++k, ++count) {
        const char* from = arrived(ring, barriers, count);
        if (k == slices - 1) give_turn(barriers, group);
        const Matrix a = matrix_at(from + group.row * ROW_BYTES);
        const int first = ACROSS ? group.column / 64 * BOX_BYTES + group.column % 64 * 2 : group.column * ROW_BYTES;
        const Matrix w = matrix_at(from + A_BYTES + first, ACROSS ? BOX_BYTES : 16);
#pragma unroll
        for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
        fence_sums();
#pragma unroll
        for (int step = 0; step < SLICE / 16; ++step) {
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m) {
                multiply<ACROSS>(sums[m], further(a, m * 64 * ROW_BYTES + 32 * step),
                                 further(w, (ACROSS ? 16 * ROW_BYTES : 32) * step), k > 0 || step > 0);
            }
        }
        end_products();
#pragma unroll
        for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
        if (k > 0) {
            wait_for_products<1>();
            release(barriers, group, count - 1);
        }
    }
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
    release(barriers, group, count - 1);
}

// Sends this block's sums over its split of K to the other blocks of the cluster, and adds the sums of all splits, in
// order, for the columns that this block finishes. received: shared memory for the sums from other blocks.
__device__ __forceinline__ void combine(const Sums& sums, Finals& finals, char* received, Barrier& arrived,
                                        const Group& group, int rank) {
    constexpr int FOURS = PART_N / 8;  // vectors of four sums that a thread sends to a block, per 64 rows
    const auto place = [&](int from, int to, int m, int i) {
        const int other = from - (from > to), four = ((other * CONSUMERS + group.index) * BLOCKS_M + m) * FOURS + i;
        return reinterpret_cast<float*>(received) + 4 * (four * GROUP + group.thread);
    };
    if (group.thread == 0) arrive_and_expect(arrived, (GEMM_SPLITS - 1) * FOURS * BLOCKS_M * GROUP * 16);
    __syncwarp();
    wait_for_cluster();  // the barriers of other blocks are initialised
#pragma unroll
    for (int owner = 0; owner < GEMM_SPLITS; ++owner) {
        if (owner == rank) continue;
#pragma unroll
        for (int i = 0; i < FOURS * BLOCKS_M; ++i) {
            const float* v = sums[i / FOURS] + owner * PART_N / 2 + i % FOURS * 4;
            store_at(owner, place(rank, owner, i / FOURS, i % FOURS), arrived, v[0], v[1], v[2], v[3]);
        }
    }
    wait<true>(arrived, 0, "sums");
#pragma unroll
    for (int split = 0; split < GEMM_SPLITS; ++split) {
#pragma unroll
        for (int i = 0; i < FOURS * BLOCKS_M; ++i) {
            float v[4];
            if (split == rank) {
#pragma unroll
                for (int owner = 0; owner < GEMM_SPLITS; ++owner) {
                    if (owner != split) continue;
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[k] = sums[i / FOURS][owner * PART_N / 2 + i % FOURS * 4 + k];
                }
            } else {
                const float* from = place(split, rank, i / FOURS, i % FOURS);
                *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(from);
            }
            float* to = finals[i / FOURS] + i % FOURS * 4;
#pragma unroll
            for (int k = 0; k < 4; ++k) to[k] = split == 0 ? v[k] : to[k] + v[k];
        }
    }
}
