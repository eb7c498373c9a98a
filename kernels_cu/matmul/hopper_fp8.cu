// GEMM for Hopper with FP8 weights:
//
//   out = [residual +] [gelu](a w^T w_scale + bias)     a (M, K), w (N, K), out and residual (M, N), w_scale, bias (N)
//
// a is __half, w FP8; sums are float, out is __half or float. w_scale: with GEMM_SCALED.
//
//   gemm_fp8_hopper: FP8 weights go through registers, which widen them, into wgmma's first operand
//
// No other operand can come from registers. So w is the a of matmul/hopper.cuh here and a its w: the product is that of
// (N, K) and (K, M), a group's part of a tile has GEMM_GROUP_M rows of w and GEMM_GROUP_N rows of a, and the epilogue
// transposes the sums on their way to out. matmul/hopper.cuh describes the rest.
//
// What bounds such products is shared memory, with 128 bytes a cycle. For 64 along K of 128 x 128 outputs, which the
// tensor cores multiply in 512 cycles, in KB:
//
//                              copies   read by lanes   read by wgmma
//   two matrices of 16 bits    32                       48
//   FP8, widened in memory     24       8 + 16 written  48
//   FP8, widened in registers  24       8, like 16      32
//
// A lane needs two neighbouring numbers of 8, as wgmma orders them along K: it loads 2 bytes at a time, which takes
// twice as long as wide loads would. Exchanging parts of wide loads between lanes would take as long as that saves.
//
// NVIDIA H200, E4M3 with scales, us a launch in a graph (with weights of 16 bits; widened in memory first):
//
//   M       N 2304 K 768       N 3072 K 768       N 4096 K 4096        N 11008 K 4096        N 4096 K 11008
//   512     6.4 (5.7, 12.4)    7.1 (6.3, 14.8)    25.6 (25.0, 46.2)    71.3 (65.6, 121.2)    65.9 (63.3, 116.1)
//   1024    9.1 (8.3, 16.1)    10.8 (8.9, 17.6)   44.8 (47.0, 68.2)    137.8 (129.6, 189.5)  116.0 (123.3, 181.0)
//
// The products along K are added in the same order for every tile, which is that of matmul/hopper.cu: a row has the
// same bits in any batch, and w the same as its numbers in 16 bits.
//
// Any M; N is a multiple of 8, K of 16; all arrays are aligned to 16 bytes. residual may be out: the copy engine reads
// an element before it writes it. The boxes of the tensor maps are (1, GEMM_M, 64) of w, (1, GEMM_N / GEMM_SHARES, 64)
// of a, and (1, GEMM_CHUNK, 64) of the output.
//
// architecture: sm_90a
#ifndef STORAGE_FP16
#define STORAGE_FP16
#endif
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#define GEMM_A_ITEM 1
#ifndef GEMM_M  // rows of w
#define GEMM_M 128
#endif
#ifndef GEMM_DOWN
#define GEMM_DOWN 1
#endif
#include "lib/fast.cuh"
#include "lib/storage.cuh"
#include "matmul/hopper.cuh"

#ifndef GEMM_FLOAT_OUT  // out and residual are float
#define GEMM_FLOAT_OUT 0
#endif
#ifndef GEMM_SCALED
#define GEMM_SCALED 0
#endif

constexpr int STEPS = SLICE / 16;
constexpr int UNIT_BYTES = 16;  // of a row of w, in one step
// Sets of registers for w, of a step each: while one is loaded, the products of the others are under way.
constexpr int AHEAD = BLOCKS_M * GEMM_GROUP_N > 320 ? 2 : 4;  // limited by free registers

static_assert(GEMM_SPLITS == 1, "a block has all of K");
static_assert(STEPS % AHEAD == 0, "each step of a slice has its set of registers");
static_assert(GEMM_GROUP_M <= GROUP, "a thread has the bias of a row of w");

typedef float Sums[BLOCKS_M][GEMM_GROUP_N / 2];  // of a thread

struct Rest {  // shared memory after the ring and the chunks
    float bias[CONSUMERS][(1 + GEMM_SCALED) * GEMM_GROUP_M];  // followed by w_scale
    Barriers barriers;
};

// Loads and widens a lane's part of 16 along K; `from`: its two numbers of the first row. Rows that are 8 apart are
// swizzled alike.
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

// Computes the sums of a tile from the ring's slices, from `count` on. While products are under way, the numbers of w
// for the next one are loaded into other registers. The lanes of a warp read 8 bytes of each of 8 rows at a time, whose
// swizzled units are in different banks.
__device__ __forceinline__ void multiply_tile(Sums& sums, const char* ring, Barriers& barriers, const Group& group,
                                              unsigned count, int slices) {
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
            wait_for_products<AHEAD - 1>();  // all but those that use the other sets of registers
            load_step(w[step % AHEAD], from + (own ^ step * UNIT_BYTES));
            fence_sums();
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m) {
                multiply(sums[m], w[step % AHEAD][m], further(a, 32 * step), k > 0 || step > 0);
            }
            end_products();
        }
        // The products of the slice before have ended. Between two steps, this code would make the compiler wait for
        // each product.
        if (k > 0) release(barriers, group, count - 1);
    }
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
    release(barriers, group, count - 1);
}

// The bias and the scale of a lane's rows of w in a 64-row block: 8 apart. volatile: the compiler would otherwise keep
// those of both blocks in registers.
struct Row {
    float bias[2], scale[2];

    __device__ __forceinline__ Row(const volatile float* own_bias, const Group& group, int block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const volatile float* at = own_bias + block * 64 + group.warp * 16 + half * 8 + group.lane / 4;
            bias[half] = *at;
            scale[half] = GEMM_SCALED ? at[GEMM_GROUP_M] : 1.0f;
        }
    }

    __device__ __forceinline__ float finished(float sum, int half) const {
        if (GEMM_SCALED) sum *= scale[half];
        sum += bias[half];
        return GEMM_GELU ? gelu_fast(sum) : sum;
    }
};

// Stores 16-bit outputs, as Chunks of matmul/hopper_tile.cuh: chunks of GEMM_CHUNK rows of out and 64 columns go
// through shared memory and the copy engine, which also loads the residual into the chunk's buffer.
struct Chunks {
    char* const buffers;  // two buffers
    Barrier* const arrived;
    const Group& group;
    unsigned count = 0;  // chunks so far, which alternate between the buffers

    __device__ char* buffer(unsigned chunk) const { return buffers + chunk % BUFFERS * CHUNK_BYTES; }

    // Requests the residual of the tile's chunks `from` .. `to` - 1; their buffers are free or about to be.
    __device__ void ask(const TensorMap& residual, int from, int to, int row, int column) const {
        if (group.thread != 0) return;
        wait_for_reads<0>();
        for (int c = from; c < to && c < CHUNKS * BLOCKS_M; ++c) {
            Barrier& barrier = arrived[(count + c - from) % BUFFERS];
            arrive_and_expect(barrier, CHUNK_BYTES);
            load_box(buffer(count + c - from), residual, barrier, column + c / CHUNKS * 64,
                     row + c % CHUNKS * GEMM_CHUNK, 0);
        }
    }

    // row, column: of out, where the group's part begins.
    __device__ void store(const Sums& sums, const float* own_bias, const TensorMap& residual, const TensorMap& out,
                          int row, int column) {
        const int lane = group.lane;
        // Of the lane's 8 values in 16 rows by 16 columns: matrix i has the rows of i / 2 and the columns of i % 2.
        const int place = swizzled((lane / 16 * 8 + lane % 8) * 128 + (2 * group.warp + lane / 8 % 2) * 16);
#pragma unroll
        for (int c = 0; c < CHUNKS * BLOCKS_M; ++c, ++count) {
            const Row lines(own_bias, group, c / CHUNKS);
            int to = shared_address(buffer(count)) + place;
            asm volatile("" : "+r"(to));  // otherwise the compiler keeps the addresses of all chunks in registers
            unsigned y[GEMM_CHUNK / 16][4];
            if (GEMM_RESIDUAL) {
                wait(arrived[count % BUFFERS], count / BUFFERS & 1, "residual");
#pragma unroll
                for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                    load_transposed(y[j][0], y[j][1], y[j][2], y[j][3], to + 16 * 128 * j);
                }
            }
#pragma unroll
            for (int k = 0; k < GEMM_CHUNK / 4; ++k) {
                const int j = k / 4, i = k % 4;
                const float* sum = sums[c / CHUNKS] + c % CHUNKS * (GEMM_CHUNK / 2) + 8 * j + i / 2 * 4 + i % 2 * 2;
                float v[2] = {lines.finished(sum[0], i % 2), lines.finished(sum[1], i % 2)};
                if (GEMM_RESIDUAL) {
                    float old[2];
                    Vec<T, 2>{y[j][i]}.unpack(old);
                    v[0] += old[0], v[1] += old[1];
                }
                y[j][i] = Vec<T, 2>::pack(v).raw;
            }
            if (GEMM_RESIDUAL) {
                __syncwarp();
            } else {
                if (group.thread == 0) wait_for_reads<BUFFERS - 1>();
                group.sync();
            }
#pragma unroll
            for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                store_transposed(to + 16 * 128 * j, y[j][0], y[j][1], y[j][2], y[j][3]);
            }
            show_writes();
            group.sync();
            if (group.thread == 0) {
                store_box(out, buffer(count), column + c / CHUNKS * 64, row + c % CHUNKS * GEMM_CHUNK, 0);
                end_stores();
            }
            if (GEMM_RESIDUAL && c + BUFFERS < CHUNKS * BLOCKS_M) {  // into this buffer, once it has been read
                count += BUFFERS;
                ask(residual, c + BUFFERS, c + BUFFERS + 1, row, column);
                count -= BUFFERS;
            }
        }
    }
};

// Stores floats directly to memory: eight lanes have 32 bytes of a row. Several residuals are loaded at once, because
// the compiler does not know that stores before a load write to other addresses.
__device__ __forceinline__ void store_float(const Sums& sums, const Group& group, const float* own_bias,
                                            const float* residual, float* out, int row, int column, int M, int N) {
    constexpr int FOURS = BLOCKS_M * GEMM_GROUP_N / 8;  // of sums: of 2 neighbouring rows and 2 columns 8 apart
    constexpr int AT_ONCE = BLOCKS_M * GEMM_GROUP_N > 256 ? 1 : 4;  // limited by free registers
    const int lane_row = row + group.lane % 4 * 2, lane_column = column + group.warp * 16 + group.lane / 4;
    const int columns_left = N - lane_column;
    int rows_left = M - lane_row;
    long long at = (long long)lane_row * N + lane_column;
#pragma unroll
    for (int first = 0; first < FOURS; first += AT_ONCE) {
        asm volatile("" : "+l"(at), "+r"(rows_left));  // otherwise the compiler keeps all addresses in registers
        float r[AT_ONCE * 4];
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4 && GEMM_RESIDUAL; ++i) {
            const int four = first + i / 4, below = (four / BLOCKS_M - first / BLOCKS_M) * 8 + i % 2;
            const int right = four % BLOCKS_M * 64 + i % 4 / 2 * 8;
            const bool there = below < rows_left && right < columns_left;
            r[i] = there ? __ldcg(residual + at + (below * N + right)) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; ++i) {
            const int four = first + i / 4, below = (four / BLOCKS_M - first / BLOCKS_M) * 8 + i % 2;
            const int right = four % BLOCKS_M * 64 + i % 4 / 2 * 8;
            const Row lines(own_bias, group, four % BLOCKS_M);
            float y = lines.finished(sums[four % BLOCKS_M][four / BLOCKS_M * 4 + i % 4], i % 4 / 2);
            if (GEMM_RESIDUAL) y += r[i];
            if (below < rows_left && right < columns_left) out[at + (below * N + right)] = y;
        }
        const int further = ((first + AT_ONCE) / BLOCKS_M - first / BLOCKS_M) * 8;
        at += (long long)further * N, rows_left -= further;
    }
    group.sync();  // biases and scales are no longer needed
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_fp8_hopper(
    const __grid_constant__ TensorMap a,         // (1, M, K)
    const __grid_constant__ TensorMap w,         // (1, N, K)
    const __grid_constant__ TensorMap residual,  // (1, M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (1, M, N)
    const float* __restrict__ w_scale,           // (N), with GEMM_SCALED
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT used instead of the maps
    float* out_float,                            // (M, N)
    int M, int N, int K) {
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    Rest& rest = *reinterpret_cast<Rest*>(buffers + (GEMM_FLOAT_OUT ? 0 : CONSUMERS * BUFFERS * CHUNK_BYTES));
    Barriers& barriers = rest.barriers;

    let_next_start();
    if (threadIdx.x == 0) {
        prefetch(a), prefetch(w);
        barriers.start();
    }
    start_block();

    Work at(N, M, K, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (uniform(threadIdx.x / GROUP) == 0) {
        run_producer([&] {
            const auto load_fp8 = [&](int slice, int row, int, int stage) {
                load_box(ring + stage * STAGE_BYTES, w, barriers.full[stage], slice * SLICE, row, 0);
            };
            produce_slices(barriers, at, load_fp8, [&](int slice, int, int column, int stage) {
                const int first = GEMM_SHARES > 1 ? at.rank * (GEMM_N / GEMM_SHARES) : 0;
                char* to = ring + stage * STAGE_BYTES + A_BYTES + first * ROW_BYTES;
                load_w_box(to, a, barriers.full[stage], slice * SLICE, column + first, 0);
            });
        });
        return;
    }
    take_registers<240>();
    const Group group;
    float* const own_bias = rest.bias[group.index];
    Chunks chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, barriers.residual[group.index], group};
    wait_before_copies();
    unsigned count = 0;
    for (int i = 0; at.left(); at.next(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.column() + group.column, column = at.row() + group.row;  // of out
        if (GEMM_RESIDUAL && !GEMM_FLOAT_OUT) chunks.ask(residual, 0, BUFFERS, row, column);
        if (group.thread < GEMM_GROUP_M) {
            const int n = column + group.thread;
            own_bias[group.thread] = bias && n < N ? bias[n] : 0.0f;
            if (GEMM_SCALED) own_bias[GEMM_GROUP_M + group.thread] = n < N ? w_scale[n] : 0.0f;
        }
        Sums sums;
        wait_for_turn(barriers, group, i);
        multiply_tile(sums, ring, barriers, group, count, at.last - at.first);
        group.sync();  // biases and scales are complete
        if (GEMM_FLOAT_OUT) store_float(sums, group, own_bias, residual_float, out_float, row, column, M, N);
        else chunks.store(sums, own_bias, residual, out, row, column);
    }
}
