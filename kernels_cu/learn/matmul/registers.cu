// Matrix product with bias: C = A B + bias, row-major fp32 (the last variant after learn/matmul/ladder.cu).
//
//   A (M, K)   B (K, N)   bias (N) or null   C (M, N)        any M, N, K
//
//   matmul_forward_kernel3: 8x8 outputs per thread in registers, 16-byte loads, cp.async, no bank conflicts. With the
//       smallest tile, a thread computes 4x4 outputs
//
// A block computes a ROWS x COLUMNS tile of C. Differences from matmul_forward_kernel2:
//
//   - Coarsening along both axes: 8 values of A and 8 of B give 64 products. A step along k takes 4 loads of 16 bytes
//     from shared memory for 64 multiply-adds, half of what shared memory can deliver in that time. A is transposed
//     while it is copied: k is the outer dimension. Rows, columns and lanes are arranged so that no copy and no load
//     has bank conflicts.
//   - Slices of DEPTH values along k pass through STAGES buffers. cp.async copies them directly to shared memory: the
//     copies need no registers and one barrier per slice, and the next slices are in flight during the products.
//   - The loop has no bounds checks. Threads after the end of C read its last row or column again and store nothing.
//     The incomplete slice is the first one, padded with leading zeros.
//   - Concurrent blocks process neighbouring tiles, in bands of BAND rows of tiles, so that they find A and B in the L2
//     cache.
//   - If C has too few 128x128 tiles for all multiprocessors, tiles are smaller, and GROUPS groups of warps share a
//     tile. Each group multiplies its part of every slice. At the end the sums of the groups are added in a tree, in a
//     fixed order. (A single group adds the products of an output in the order of k, like the other variants.)
//
//   a warp's part of the tile, 8 SIDE x 32 (SIDE: rows per thread): lane (ty, tx), ty = 0..7, tx = 0..3, has
//     rows 4 ty + 32 h + e (h < SIDE / 4, e = 0..3)        columns 4 tx + 16 g + e (g = 0, 1; e = 0..3)
//
// Block (4 ROWS / SIDE * COLUMNS / 32 * GROUPS), grid (ceil(M / ROWS) * ceil(N / COLUMNS)). Dynamic shared memory, in
// floats: DEPTH * (ROWS + 4 + COLUMNS) * STAGES, or with GROUPS > 1 at least ROWS * COLUMNS * GROUPS / 2. WIDTH 4:
// 16-byte copies of B and stores to C, for N a multiple of 4, B and C aligned to 16 bytes; otherwise WIDTH 1. Before
// sm_80 there is no cp.async: the next slice is copied synchronously, through registers.
#include "lib/matmul/registers.cuh"

#ifndef MM_ROWS
#define MM_ROWS 128
#endif
#ifndef MM_COLUMNS
#define MM_COLUMNS 128
#endif
#ifndef MM_DEPTH
#define MM_DEPTH 16
#endif
#ifndef MM_SIDE
#define MM_SIDE 8
#endif
#ifndef MM_GROUPS
#define MM_GROUPS 1
#endif
#ifndef MM_STAGES
#define MM_STAGES 2
#endif
#ifndef MM_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define MM_BLOCKS 2
#endif
#ifndef MM_WIDTH
#define MM_WIDTH 4
#endif

constexpr int ROWS = MM_ROWS, COLUMNS = MM_COLUMNS, DEPTH = MM_DEPTH, SIDE = MM_SIDE, GROUPS = MM_GROUPS;
constexpr int STAGES = MM_STAGES, WIDTH = MM_WIDTH;
constexpr int BAND = 16;  // rows of tiles per band; blocks process band after band
constexpr int WARP_ROWS = 8 * SIDE, WARP_COLUMNS = 32;
constexpr int WARPS_ACROSS = COLUMNS / WARP_COLUMNS;
constexpr int GROUP = 32 * (ROWS / WARP_ROWS) * WARPS_ACROSS;  // threads per group
constexpr int THREADS = GROUP * GROUPS;
constexpr int SHARE = DEPTH / GROUPS;  // values of a slice along k that one group multiplies
constexpr int STRIDE = ROWS + 4;       // distance between A[.][k] and A[.][k + 1] in shared memory
constexpr int STAGE = DEPTH * (STRIDE + COLUMNS);

static_assert(ROWS % WARP_ROWS == 0 && COLUMNS % WARP_COLUMNS == 0, "a tile is made of whole warps");
static_assert(DEPTH % 8 == 0 && DEPTH % GROUPS == 0, "8 lanes copy neighbours along k; every group has its share");
static_assert((GROUPS & (GROUPS - 1)) == 0, "the sums of the groups are added in a tree");
static_assert(STAGES >= 2, "one buffer is read while another one is filled");
static_assert(THREADS % (COLUMNS / WIDTH) == 0, "a thread copies the same column of some rows of B");

// Adds the groups' sums in a tree: the upper half of the groups passes its sums to the lower half, until one group has
// the total.
__device__ __forceinline__ void add_groups(float (&sum)[SIDE][8], float* shared, int group, int member) {
#pragma unroll
    for (int half = GROUPS / 2; half > 0; half /= 2) {
        float* mine = shared + (group % half * 2 * SIDE * GROUP + member) * 4;
        __syncthreads();  // previous sums at these addresses have been read
        if (group >= half && group < 2 * half) {
#pragma unroll
            for (int r = 0; r < SIDE; ++r) {
                st_vec(mine + 8 * r * GROUP, make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
                st_vec(mine + (8 * r + 4) * GROUP, make_float4(sum[r][4], sum[r][5], sum[r][6], sum[r][7]));
            }
        }
        __syncthreads();
        if (group < half) {
#pragma unroll
            for (int r = 0; r < SIDE; ++r) {
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    const float4 v = ld_vec(mine + (8 * r + 4 * g) * GROUP);
                    sum[r][4 * g] += v.x;
                    sum[r][4 * g + 1] += v.y;
                    sum[r][4 * g + 2] += v.z;
                    sum[r][4 * g + 3] += v.w;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MM_BLOCKS) matmul_forward_kernel3(
    const float* __restrict__ A,     // (M, K)
    const float* __restrict__ B,     // (K, N)
    const float* __restrict__ bias,  // (N) or null
    float* __restrict__ C,           // (M, N)
    int M, int K, int N) {
    extern __shared__ __align__(16) float shared[];  // STAGES slices of STAGE floats; later GROUPS / 2 tiles of sums

    // Position of the tile. Each BAND rows of tiles form a band; blocks process a band column by column.
    const int down = (M + ROWS - 1) / ROWS, across = (N + COLUMNS - 1) / COLUMNS;
    const int tile = blockIdx.x;
    const int band = tile / (BAND * across), in_band = tile % (BAND * across);
    const int height = min(BAND, down - band * BAND);
    const int tile_row = (band * BAND + in_band % height) * ROWS;
    const int tile_column = in_band / height * COLUMNS;

    // This thread's copies. A: 8 lanes copy 32 bytes of a row, a warp copies 4 rows. The values are transposed: in
    // shared memory, k is the outer dimension. B: WIDTH values of a row, and of every B_STEP-th row after it.
    constexpr int A_STEP = THREADS / 8, B_STEP = THREADS / (COLUMNS / WIDTH);
    const int thread = threadIdx.x;
    const int a_row = thread / 8, a_k = thread % 8;
    const int b_k = thread / (COLUMNS / WIDTH), b_column = thread % (COLUMNS / WIDTH) * WIDTH;
    const int slices = (K + DEPTH - 1) / DEPTH, missing = slices * DEPTH - K;
    auto copy_slice = [&](int slice, bool full, float* to) {
        const int k0 = slice * DEPTH - missing;
        float* a_to = to + a_k * STRIDE + a_row;
#pragma unroll
        for (int r = 0; r < ROWS; r += A_STEP) {
            if (ROWS % A_STEP != 0 && r + a_row >= ROWS) break;
            const long long at = (long long)min(tile_row + a_row + r, M - 1) * K + (k0 + a_k);
#pragma unroll
            for (int k = 0; k < DEPTH; k += 8) {
                const bool inside = full || k0 + a_k + k >= 0;
                copy<1>(a_to + k * STRIDE + r, A + (inside ? at + k : 0), inside);
            }
        }
        const long long at = (long long)(k0 + b_k) * N + min(tile_column + b_column, N - WIDTH);
        float* b_to = to + DEPTH * STRIDE + b_k * COLUMNS + b_column;
#pragma unroll
        for (int k = 0; k < DEPTH; k += B_STEP) {
            if (DEPTH % B_STEP != 0 && k + b_k >= DEPTH) break;
            const bool inside = full || k0 + b_k + k >= 0;
            copy<WIDTH>(b_to + k * COLUMNS, B + (inside ? at + (long long)k * N : 0), inside);
        }
    };

    // This thread's outputs. The lane's bits are permuted so that each half of a warp reads 8 different rows of A and 2
    // different groups of columns of B, and lanes that differ in one of the lowest two bits read the same columns or
    // rows. (With lanes in natural order, the largest tile is as fast, but a tile of 64x128 a third slower.)
    const int group = GROUPS == 1 ? 0 : thread / GROUP, member = GROUPS == 1 ? thread : thread % GROUP;
    const int warp = member / 32, lane = member % 32;
    const int ty = (lane & 1) | (lane >> 1 & 6), tx = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int row = warp / WARPS_ACROSS * WARP_ROWS + 4 * ty;
    const int column = warp % WARPS_ACROSS * WARP_COLUMNS + 4 * tx;
    const int a_at = group * SHARE * STRIDE + row;
    const int b_at = DEPTH * STRIDE + group * SHARE * COLUMNS + column;
    float sum[SIDE][8] = {};

    copy_slice(0, false, shared);
    end_group_of_copies();
#pragma unroll
    for (int s = 1; s < STAGES - 1; ++s) {
        if (s < slices) copy_slice(s, true, shared + s * STAGE);
        end_group_of_copies();
    }
    int now = 0, next = (STAGES - 1) * STAGE;
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
        wait_for_copies_but<STAGES - 2>();
        __syncthreads();  // the slice is complete; the previous one has been read, so its buffer can be filled
        if (slice + STAGES - 1 < slices) copy_slice(slice + STAGES - 1, true, shared + next);
        end_group_of_copies();
        add_slice<SHARE, STRIDE, COLUMNS>(sum, shared + now + a_at, shared + now + b_at);
        next = now;
        now = now == (STAGES - 1) * STAGE ? 0 : now + STAGE;
    }
    add_groups(sum, shared, group, member);
    if (group > 0) return;

    const int c = tile_column + column;
    float shift[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int n = c + j % 4 + j / 4 * 16;
        shift[j] = bias && n < N ? bias[n] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < SIDE; ++r) {
        const int m = tile_row + row + r % 4 + r / 4 * 32;
        if (m >= M) break;
        float* to = C + ((long long)m * N + c);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = sum[r][4 * g + e] + shift[4 * g + e];
            if (WIDTH == 4) {
                if (c + 16 * g < N) st_vec(to + 16 * g, make_float4(v[0], v[1], v[2], v[3]));
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (c + 16 * g + e < N) to[16 * g + e] = v[e];
                }
            }
        }
    }
}
