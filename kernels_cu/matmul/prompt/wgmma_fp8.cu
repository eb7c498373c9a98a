// GEMM for Hopper with FP8 weights. lib/matmul/wgmma_registers.cuh has the formula.
//
//   gemm_fp8_wgmma: FP8 weights are widened in registers, as wgmma's first operand
//
// Products of this kind are bound by shared memory, which delivers 128 bytes per cycle. For 128 x 128 outputs, the
// tensor cores multiply a slice of 64 values along K in 512 cycles. Amounts of data moved in shared memory, in KB:
//
//                              copies   read by lanes   read by wgmma
//   two matrices of 16 bits    32                       48
//   FP8, widened in memory     24       8 + 16 written  48
//   FP8, widened in registers  24       8 (as 16)       32
//
// In wgmma's first operand, a lane holds two neighbouring values of every 8 along K. A lane therefore loads 2 bytes at
// a time, which takes twice as long as wide loads. If lanes loaded more bytes and exchanged parts of them, the exchange
// would take as long as the wide loads save.
//
// A product whose weights another kernel first widens in memory takes much longer. GEMM_STREAM gives clusters equal
// parts of all slices, so that no multiprocessor is idle while others compute a last tile.
//
// Measured: docs/experiments.md#gemm_split_wgmma-gemm_fp8_wgmma-and-gemm_gguf_wgmma
//
// K is a multiple of 16. The boxes of the tensor map of w are (1, GEMM_M, 64).
//
// architecture: sm_90a
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#define GEMM_A_ITEM 1
#include "lib/matmul/wgmma_registers.cuh"

constexpr int STEPS = SLICE / 16;
constexpr int UNIT_BYTES = 16;  // bytes of a row of w per step (16 along K)
// Number of register sets for w, one set per step: while one set is loaded, products with the other sets are running.
constexpr int AHEAD = BLOCKS_M * GEMM_GROUP_N > 320 ? 2 : 4;  // limited by the number of free registers

static_assert(STEPS % AHEAD == 0, "each step of a slice has its set of registers");

// Loads the lane's values of w for a step (16 along K) and converts them to float16. from: address of the lane's first
// two values in its first row. Rows that are 8 apart have the same swizzle.
__device__ __forceinline__ void load_step(unsigned (&w)[BLOCKS_M][4], const char* from) {
    unsigned two[BLOCKS_M][4];
#pragma unroll
    for (int i = 0; i < 4 * BLOCKS_M; ++i) {
        const char* at = from + (i / 4 * 64 + i % 2 * 8) * A_ROW_BYTES + i % 4 / 2 * (UNIT_BYTES / 2);
        two[i / 4][i % 4] = *reinterpret_cast<const unsigned short*>(at);
    }
#pragma unroll
    for (int i = 0; i < 4 * BLOCKS_M; ++i) w[i / 4][i % 4] = W::halves(two[i / 4][i % 4], 0);
}

struct Fp8 {
    static constexpr int BYTES = 0, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    const TensorMap& map;

    __device__ __forceinline__ void place(char*) {}
    __device__ __forceinline__ void start() const { prefetch(map); }
    __device__ __forceinline__ void skip(int, int) const {}

    __device__ __forceinline__ void produce(const Product& p, char* ring, Barriers& barriers, const Work& at) const {
        if (threadIdx.x / 32 != 0 || !elect_one()) return;
        const auto load_fp8 = [&](int slice, int row, int, int stage) {
            load_box(ring + stage * STAGE_BYTES, map, barriers.full[stage], slice * SLICE, row, 0);
        };
        produce_slices(barriers, at, load_fp8, [&](int slice, int, int column, int stage) {
            p.load(ring, barriers, at.rank, slice, column, stage);
        });
    }

    // Computes the sums of a tile. While products are running, the values of w for the next products are loaded into
    // other registers. The lanes of a warp read 8 bytes of each of 8 rows at a time; swizzling avoids bank conflicts.
    __device__ __forceinline__ void multiply(Sums& sums, const char* ring, Barriers& barriers, const Group& group,
                                             unsigned count, const Work& at) const {
        const int slices = at.last - at.first;
        const int row = group.warp * 16 + group.lane / 4;
        const int own = (group.row + row) * A_ROW_BYTES + row / 2 % 4 * UNIT_BYTES + group.lane % 4 * 2;
        unsigned w[AHEAD][BLOCKS_M][4];
#pragma unroll 1
        for (int k = 0; k < slices; ++k, ++count) {
            const char* from = arrived(ring, barriers, count);
            if (k == slices - 1) give_turn(barriers, group);
            const Matrix a = matrix_at(from + A_BYTES + group.column * ROW_BYTES);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                wait_for_products<AHEAD - 1>();  // products with this register set are complete
                load_step(w[step % AHEAD], from + (own ^ step * UNIT_BYTES));
                fence_sums();
#pragma unroll
                for (int m = 0; m < BLOCKS_M; ++m) {
                    ::multiply(sums[m], w[step % AHEAD][m], further(a, 32 * step), at.continues() || k > 0 || step > 0);
                }
                end_products();
            }
            // All products of the previous slice have ended. If this release were between two steps, the compiler would
            // wait for each product.
            if (k > 0) release(barriers, group, count - 1);
        }
        wait_for_products<0>();
#pragma unroll
        for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
        release(barriers, group, count - 1);
    }
};

// Launched by operation (variant): gemm (fp8 wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_fp8_wgmma(
    const __grid_constant__ TensorMap a,         // (1, M, K)
    const __grid_constant__ TensorMap w,         // (1, N, K)
    const __grid_constant__ TensorMap residual,  // (1, M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (1, M, N)
    const float* __restrict__ w_scale,           // (N), with GEMM_SCALED
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT, used instead of the map
    float* out_float,                            // (M, N)
    float* handed,                               // GEMM_STREAM: (1024 + blocks GEMM_M GEMM_N) floats, initially zeros
    int M, int N, int K) {
    run(Product{a, residual, out, w_scale, bias, residual_float, out_float, handed, M, N, K}, Fp8{w});
}
