// GEMM for Hopper with weights in GGUF blocks (lib/gguf.cuh). lib/matmul/wgmma_registers.cuh has the formula.
//
//   gemm_gguf_wgmma: GGUF weights become float16 in registers, each rounded once, as wgmma's first operand
//
// A second ring buffer, in addition to the ring of slices of a, holds GGUF blocks. For each eight rows of w, a warp of
// the loading warpgroup copies a tile of 128 or 256 values along K, whose bytes are contiguous. A lane unpacks 32
// values along K of two rows while the products of the previous 32 values are running:
//
//   copies     | a 64 | a 64 | a 64 | a 64 |   blocks 256   |
//   unpack     32 | 32 | 32 | ...
//   multiply        32 | 32 | 32 | ...
//
// An earlier version computed weights as floats. For a chunk of 32 values along K in Q4_K, a lane has 16 weights, for
// which it executed 120 instructions; the prediction was 72. Because instructions wait for results of previous ones, a
// warp issued one instruction in 4.2 cycles, and the two warpgroups of a block took about twice the cycles that the
// tensor cores need. Now weights are computed as pairs of float16; for each chunk, a lane executes 92 instructions, of
// which 53 compute weights.
//
// GEMM_STREAM gives the clusters equal parts of all slices. Without GEMM_STREAM, 132 multiprocessors take two waves for
// 1.45 waves of tiles (N 12288) and for 1.3 waves (N 11008).
//
// Measured: docs/experiments.md#gemm_split_wgmma-gemm_fp8_wgmma-and-gemm_gguf_wgmma
//
// K is a multiple of 32. The range of outputs of each GGUF type begins at a multiple of GEMM_M.
//
// architecture: sm_90a
#define WEIGHT_GGUF 1
#define GEMM_A_ITEM 0  // the ring of slices holds no w: GGUF blocks have a separate ring
#ifndef GEMM_GROUP_M
#define GEMM_GROUP_M 64
#endif
#include "lib/matmul/wgmma_registers.cuh"
#include "lib/sm80.cuh"
#include "lib/gguf_ranges.cuh"

static_assert(BLOCKS_M == 1, "a lane has two rows");

constexpr int TILE_GROUPS = GEMM_M / gguf::ROW_GROUP;
constexpr int BLOCK_BYTES = TILE_GROUPS * gguf::largest_tile();  // bytes of GGUF blocks per stage
constexpr int GGUF_STAGES = gguf::OfRange<0>::Of::WIDE ? 2 : 3;

struct Blocks {
    struct Ring {
        Barrier full[GGUF_STAGES], empty[GGUF_STAGES];
        char tiles[GGUF_STAGES][BLOCK_BYTES];
    };
    static constexpr int BYTES = (sizeof(Ring) + 15) / 16 * 16, PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

    const W* w;
    Ring* ring = nullptr;
    unsigned count = 0;  // number of stages used so far

    __device__ __forceinline__ void place(char* own) { ring = reinterpret_cast<Ring*>(own); }

    __device__ __forceinline__ void start() {
        for (int i = 0; i < GGUF_STAGES; ++i) {
            init(ring->full[i], 1);
            init(ring->empty[i], GROUPS * GROUP);
        }
    }

    // Requests the slices of a in one warp, and the GGUF blocks of w in another warp.
    __device__ __forceinline__ void produce(const Product& p, char* slices, Barriers& barriers, const Work& at) {
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0 && elect_one()) {
            const auto nothing = [](int, int, int, int) {};
            produce_slices(barriers, at, nothing, [&](int slice, int, int column, int stage) {
                p.load(slices, barriers, at.rank, slice, column, stage);
            });
        } else if (warp == 1) {
            for (Work work = at; work.left(); work.next()) request<0>(p, work);
        }
    }

    // Requests the GGUF blocks of w for a tile of outputs; each lane requests the blocks of eight rows.
    template <int RANGE>
    __device__ __forceinline__ void request(const Product& p, const Work& work) {
        typedef gguf::OfRange<RANGE> OfRange;
        typedef typename OfRange::Of Part;
        if constexpr (!OfRange::LAST) {
            if (work.row() >= OfRange::NEXT) return request<RANGE + 1>(p, work);
        }
        constexpr int SLICES = 2 * Part::UNITS;  // slices of matrix `a` that a tile of GGUF blocks multiplies
        const int row = work.row(), begin = work.first / SLICES, end = (work.last + SLICES - 1) / SLICES;
        const int left = max(0, (OfRange::LAST ? p.N : OfRange::NEXT) - row);  // rows of w; 0 after the last tile
        const int row_groups = min(TILE_GROUPS, (left + 7) / gguf::ROW_GROUP);
        const int lane = threadIdx.x % 32, of_row = Part::row_bytes(p.K);
        const W* from = w + OfRange::begin(p.K) + (long long)((row - OfRange::FROM) / gguf::ROW_GROUP + lane) * of_row;
        for (int at = begin * Part::BYTES; at < end * Part::BYTES; at += Part::BYTES, ++count) {
            const int stage = count % GGUF_STAGES;
            if (count >= GGUF_STAGES) wait(ring->empty[stage], (count / GGUF_STAGES - 1) & 1, "empty of blocks");
            if (lane == 0) arrive_and_expect(ring->full[stage], row_groups * Part::BYTES);
            __syncwarp();
            char* const to = ring->tiles[stage] + lane * Part::BYTES;
            if (lane < row_groups) load_bytes(to, from + at, Part::BYTES, ring->full[stage]);
        }
    }

    // Skips the GGUF blocks of a tile of outputs that the other group processes.
    template <int RANGE = 0>
    __device__ __forceinline__ void skip(int K, int row) {
        typedef gguf::OfRange<RANGE> OfRange;
        if constexpr (!OfRange::LAST) {
            if (row >= OfRange::NEXT) return skip<RANGE + 1>(K, row);
        }
        count += OfRange::Of::row_bytes(K) / OfRange::Of::BYTES;
    }

    __device__ __forceinline__ void multiply(Sums& sums, const char* slices, Barriers& barriers, const Group& group,
                                             unsigned slice, const Work& at) {
        multiply_range<0>(sums, slices, barriers, group, slice, at);
    }

    template <int RANGE>
    __device__ __forceinline__ void multiply_range(Sums& sums, const char* slices, Barriers& barriers,
                                                   const Group& group, unsigned slice, const Work& at) {
        typedef gguf::OfRange<RANGE> OfRange;
        typedef typename OfRange::Of Part;
        if constexpr (!OfRange::LAST) {
            if (at.row() >= OfRange::NEXT) {
                return multiply_range<RANGE + 1>(sums, slices, barriers, group, slice, at);
            }
        }
        const int row_group = (group.row + 16 * group.warp) / gguf::ROW_GROUP, length = at.last;
        unsigned halves[2][2][4];  // [chunk % 2][wgmma step][register]
#pragma unroll 1
        for (int unit = at.first / 2; 2 * unit < length; ++unit) {
            const int stage = count % GGUF_STAGES, of_stage = unit % Part::UNITS;
            if (of_stage == 0) wait(ring->full[stage], count / GGUF_STAGES & 1, "blocks");
            const W* from = reinterpret_cast<const W*>(ring->tiles[stage]) + row_group * Part::BYTES;
            Part parts[2];
            typename Part::Factors own[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const W* tile = from + i * Part::BYTES;
                parts[i].load(tile + Part::low_at(of_stage), tile + Part::high_at(of_stage), tile + Part::scales_at(0),
                              of_stage, group.lane / 4);
                own[i] = parts[i].factors(of_stage);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = 2 * unit + half;
                if (k == length) break;
                const char* const a_at = arrived(slices, barriers, slice);
                if (k == length - 1) give_turn(barriers, group);
                const Matrix a = matrix_at(a_at + group.column * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    wait_for_products<1>();  // products with the registers halves[i] are complete
                    unpack(parts, own, 2 * half + i, halves[i]);
                    fence_sums();
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        ::multiply(sums[0], halves[i][s], further(a, 64 * i + 32 * s), k > 0 || i > 0 || s > 0);
                    }
                    end_products();
                }
                if (k > at.first) release(barriers, group, slice - 1);  // products of slice - 1 are complete
                ++slice;
            }
            // Releases the stage only after all loaded values have been used: when the release followed directly after
            // the loads, a copy into the stage overtook some loads. Each lane arrives for its own loads, as in
            // lib/decode/wgmma_gguf.cuh.
            if (of_stage + 1 == Part::UNITS || 2 * unit + 2 >= length) {
                arrive(ring->empty[stage]);
                ++count;
            }
        }
        wait_for_products<0>();
        pin(sums[0]);
        release(barriers, group, slice - 1);
    }

    // Converts the lane's weights of a chunk (32 values along K) of rows g and g + 8 of w, for two wgmma steps.
    template <typename Part>
    __device__ __forceinline__ static void unpack(const Part (&parts)[2], const typename Part::Factors (&own)[2],
                                                  int chunk, unsigned (&to)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned pairs[4];
            parts[i].halves(chunk, own[i], pairs);
            gguf::place(pairs, i, to);
        }
    }
};

// Launched by operation (variant): gemm (gguf wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_gguf_wgmma(
    const __grid_constant__ TensorMap a,         // (1, M, K)
    const W* w,                                  // (N, K), GGUF blocks
    const __grid_constant__ TensorMap residual,  // (1, M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (1, M, N)
    const float* __restrict__ w_scale,           // (N), with GEMM_SCALED
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT, used instead of the map
    float* out_float,                            // (M, N)
    float* handed,                               // GEMM_STREAM: (1024 + blocks GEMM_M GEMM_N) floats, initially zeros
    int M, int N, int K) {
    run(Product{a, residual, out, w_scale, bias, residual_float, out_float, handed, M, N, K}, Blocks{w});
}
