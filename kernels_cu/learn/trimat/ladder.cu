// Trimat: the causal half of attention's scores, out[b,h,i,j] = Q_i . K_j / sqrt(HS) for j <= i.
//
//   qkv (B, T, 3, NH, HS)   Q and K are used; consecutive rows of a head (HS values each) are 3 NH HS values apart
//   out (B, NH, T, T)       above the diagonal: computed values in tiles that the diagonal crosses, otherwise untouched
//
//              j ->
//          [ # . . . ]   #  tiles that the diagonal crosses: computed as a whole
//     i    [ x # . . ]   x  tiles below the diagonal
//     |    [ x x # . ]   .  tiles above the diagonal: neither computed nor written (a full matrix product would
//     v    [ x x x # ]      compute this half in vain)
//
// The kernels follow llm.c's trimat kernels. In each, a thread computes an 8x8 tile of out, for which it needs 8 rows
// of Q and 8 rows of K. The kernels differ in how the thread reads these 16 rows:
//
//   matmul_tri_naive: one 8x8 tile per thread, from global memory; tiles above the diagonal skipped. One dot product
//       per output: 2 loads per multiply-add, or nearly 1 if the compiler keeps the row of Q in registers from one
//       output to the next
//   matmul_tri_registers: 8 values of Q and 8 of K in registers, 64 outer-product sums per step. Each step along HS
//       takes 16 loads for 64 multiply-adds
//   matmul_tri3: matmul_tri_registers with float4 loads and stores. A thread issues 16 loads for 256 multiply-adds, and
//       16 stores for 64 outputs
//   matmul_tri4: 16x16 threads per 128x128 tile, slices of 32 through shared memory. Each value is loaded from global
//       memory once per block, not once per thread
//   (matmul_tri5 in learn/trimat/pipelined.cu is the next variant)
//   trimat_fill: stores the value `fill` above the diagonal. It runs after one of the kernels above if `fill` is given
//
// The first three kernels take blocks of 8 threads in width, and any height. A warp covers 8 tiles in width and 4 in
// height. Such a nearly square shape needs few different rows: a warp's loads from Q and K touch 4 +
// 8 rows (a width of 16 tiles and a height of 2 would need 2 + 16). Any T; HS is a multiple of 4, so that rows are
// aligned to 16 bytes if qkv is. out is also aligned to 16 bytes.
#include "lib/copies.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef HS
#define HS 64
#endif
static_assert(NH > 0 && HS > 0 && HS % 4 == 0, "rows are read as float4: HS must be a multiple of 4");

constexpr int SIDE = 8;           // rows and columns of a thread's tile
constexpr int ROW = 3 * NH * HS;  // floats between consecutive rows of a head

struct Head {
    const float* q;  // (T, HS), rows ROW apart
    const float* k;  // (T, HS), rows ROW apart
    float* out;      // (T, T)
};

__device__ Head find_head(const float* qkv, float* out, int T, int index) {  // index = b NH + h
    const float* q = qkv + (long long)(index / NH) * T * ROW + (index % NH) * HS;
    return {q, q + NH * HS, out + (long long)index * T * T};
}

__device__ __forceinline__ float scale() { return 1.0f / sqrtf((float)HS); }  // a compile-time constant

// Returns whether the 8x8 tile at (i0, j0) lies above the diagonal or outside out. i0 and j0 are multiples of 8.
__device__ __forceinline__ bool nothing_to_do(int i0, int j0, int T) { return j0 > i0 || i0 >= T; }

// launch: grid=ceil(T / 64), ceil(T / block), B * NH block=8, 32
extern "C" __global__ void matmul_tri_naive(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T) {
    const int i0 = SIDE * (blockIdx.y * blockDim.y + threadIdx.y);
    const int j0 = SIDE * (blockIdx.x * blockDim.x + threadIdx.x);
    if (nothing_to_do(i0, j0, T)) return;
    const Head head = find_head(qkv, out, T, blockIdx.z);
    for (int i = i0; i < min(i0 + SIDE, T); ++i) {
        const float* q = head.q + (long long)i * ROW;
        for (int j = j0; j < min(j0 + SIDE, T); ++j) {
            const float* k = head.k + (long long)j * ROW;
            float sum = 0.0f;
            for (int s = 0; s < HS; ++s) sum += q[s] * k[s];
            head.out[(long long)i * T + j] = sum * scale();
        }
    }
}

// Computes a thread's tile. INNER: all rows and columns of the tile exist. Otherwise each row and column is checked,
// and missing rows and columns count as zeros.
template <bool INNER>
__device__ __forceinline__ void tile_from_registers(const Head& head, int i0, int j0, int T) {
    const float* q = head.q + (long long)i0 * ROW;
    const float* k = head.k + (long long)j0 * ROW;
    float* corner = head.out + (long long)i0 * T + j0;
    float sum[SIDE][SIDE] = {};
#pragma unroll 1
    for (int s = 0; s < HS; ++s) {
        float lhs[SIDE], rhs[SIDE];
#pragma unroll
        for (int r = 0; r < SIDE; ++r) lhs[r] = INNER || i0 + r < T ? q[r * ROW + s] : 0.0f;
#pragma unroll
        for (int c = 0; c < SIDE; ++c) rhs[c] = INNER || j0 + c < T ? k[c * ROW + s] : 0.0f;
#pragma unroll
        for (int r = 0; r < SIDE; ++r) {
#pragma unroll
            for (int c = 0; c < SIDE; ++c) sum[r][c] += lhs[r] * rhs[c];
        }
    }
#pragma unroll
    for (int r = 0; r < SIDE; ++r) {
#pragma unroll
        for (int c = 0; c < SIDE; ++c) {
            if (INNER || (i0 + r < T && j0 + c < T)) corner[(long long)r * T + c] = sum[r][c] * scale();
        }
    }
}

// launch: grid=ceil(T / 64), ceil(T / block), B * NH block=8, 32
extern "C" __global__ void matmul_tri_registers(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T) {
    const int i0 = SIDE * (blockIdx.y * blockDim.y + threadIdx.y);
    const int j0 = SIDE * (blockIdx.x * blockDim.x + threadIdx.x);
    if (nothing_to_do(i0, j0, T)) return;
    const Head head = find_head(qkv, out, T, blockIdx.z);
    if (i0 + SIDE <= T) {  // then j0 + SIDE <= T as well, because j0 <= i0
        tile_from_registers<true>(head, i0, j0, T);
    } else {
        tile_from_registers<false>(head, i0, j0, T);
    }
}

__device__ __forceinline__ void add_products(float (&sum)[SIDE], float4 lhs, const float4 (&rhs)[SIDE]) {
#pragma unroll
    for (int c = 0; c < SIDE; ++c) sum[c] += lhs.x * rhs[c].x;
#pragma unroll
    for (int c = 0; c < SIDE; ++c) sum[c] += lhs.y * rhs[c].y;
#pragma unroll
    for (int c = 0; c < SIDE; ++c) sum[c] += lhs.z * rhs[c].z;
#pragma unroll
    for (int c = 0; c < SIDE; ++c) sum[c] += lhs.w * rhs[c].w;
}

// Stores a row of a tile: 8 values, of which the first `columns` exist. Rows of out are aligned to 16 bytes only if T
// is a multiple of 4; otherwise the values are stored one by one.
__device__ __forceinline__ void store_row(float* out, const float (&sum)[SIDE], int columns, bool aligned) {
    float v[SIDE];
#pragma unroll
    for (int c = 0; c < SIDE; ++c) v[c] = sum[c] * scale();
    if (aligned) {
        if (columns > 0) st_vec(out, make_float4(v[0], v[1], v[2], v[3]));
        if (columns > 4) st_vec(out + 4, make_float4(v[4], v[5], v[6], v[7]));
    } else {
#pragma unroll
        for (int c = 0; c < SIDE; ++c) {
            if (c < columns) out[c] = v[c];
        }
    }
}

__device__ __forceinline__ void tile_from_vectors(const Head& head, int i0, int j0, int T) {
    const float* q = head.q + (long long)i0 * ROW;
    const float* k = head.k + (long long)j0 * ROW;
    float sum[SIDE][SIDE] = {};
#pragma unroll 1
    for (int s = 0; s < HS; s += 4) {
        float4 rhs[SIDE];
#pragma unroll
        for (int c = 0; c < SIDE; ++c) rhs[c] = ld_vec(k + c * ROW + s);
#pragma unroll
        for (int r = 0; r < SIDE; ++r) add_products(sum[r], ld_vec(q + r * ROW + s), rhs);
    }
    float* corner = head.out + (long long)i0 * T + j0;
#pragma unroll
    for (int r = 0; r < SIDE; ++r) store_row(corner + (long long)r * T, sum[r], SIDE, T % 4 == 0);
}

// launch: grid=ceil(T / 64), ceil(T / block), B * NH block=8, 32
extern "C" __global__ void __launch_bounds__(256, 2) matmul_tri3(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T) {
    const int i0 = SIDE * (blockIdx.y * blockDim.y + threadIdx.y);
    const int j0 = SIDE * (blockIdx.x * blockDim.x + threadIdx.x);
    if (nothing_to_do(i0, j0, T)) return;
    const Head head = find_head(qkv, out, T, blockIdx.z);
    if (i0 + SIDE <= T) {  // then j0 + SIDE <= T as well, because j0 <= i0
        tile_from_vectors(head, i0, j0, T);
    } else {
        tile_from_registers<false>(head, i0, j0, T);  // the last rows, if T is not a multiple of 8
    }
}

//
// A row of a slice has 128 bytes and covers all 32 banks, so threads that read the same position of different rows
// would have bank conflicts. Therefore the 8 float4 of a row are permuted: float4 c of row r is stored at position c ^
// (r / 8 % 8). When 8 neighbouring threads read rows 8 apart, they access 8 different positions.
// launch: grid=ceil(T / 128), ceil(T / 128), B * NH block=16, 16
extern "C" __global__ void __launch_bounds__(256, 2) matmul_tri4(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T) {
    constexpr int TILE = 16 * SIDE, SLICE = 32, VECTORS = SLICE / 4;
    __shared__ __align__(16) float lhs_s[TILE][SLICE];
    __shared__ __align__(16) float rhs_s[TILE][SLICE];
    const int tile_i = TILE * blockIdx.y, tile_j = TILE * blockIdx.x;
    if (tile_j > tile_i) return;
    const Head head = find_head(qkv, out, T, blockIdx.z);

    const int tid = threadIdx.y * 16 + threadIdx.x;
    const int copy_row = tid / VECTORS, copy_vector = tid % VECTORS;  // 8 threads load the 128 bytes of a row
    constexpr int COPY_ROWS = 256 / VECTORS;
    float sum[SIDE][SIDE] = {};
    for (int s0 = 0; s0 < HS; s0 += SLICE) {
        __syncthreads();  // the previous slice has been read
        if (s0 + 4 * copy_vector < HS) {
#pragma unroll
            for (int n = 0; n < TILE; n += COPY_ROWS) {
                const int r = copy_row + n;
                const int at = 4 * (copy_vector ^ (r / SIDE % VECTORS));
                const long long i = min(tile_i + r, T - 1), j = min(tile_j + r, T - 1);  // after the end: the last row
                st_vec(&lhs_s[r][at], ld_vec(head.q + i * ROW + s0 + 4 * copy_vector));
                st_vec(&rhs_s[r][at], ld_vec(head.k + j * ROW + s0 + 4 * copy_vector));
            }
        }
        __syncthreads();  // the slice is complete
        const int vectors = min(VECTORS, (HS - s0) / 4);
#pragma unroll 1
        for (int v = 0; v < vectors; ++v) {
            const int lhs_at = 4 * (v ^ (threadIdx.y % VECTORS)), rhs_at = 4 * (v ^ (threadIdx.x % VECTORS));
            float4 rhs[SIDE];
#pragma unroll
            for (int c = 0; c < SIDE; ++c) rhs[c] = ld_vec(&rhs_s[SIDE * threadIdx.x + c][rhs_at]);
#pragma unroll
            for (int r = 0; r < SIDE; ++r) add_products(sum[r], ld_vec(&lhs_s[SIDE * threadIdx.y + r][lhs_at]), rhs);
        }
    }
    const int i0 = tile_i + SIDE * threadIdx.y, j0 = tile_j + SIDE * threadIdx.x;
    float* corner = head.out + (long long)i0 * T + j0;
#pragma unroll
    for (int r = 0; r < SIDE; ++r) {
        if (i0 + r < T) store_row(corner + (long long)r * T, sum[r], T - j0, T % 4 == 0);
    }
}

// Stores out[row][j] = value for j > i, i = row % T. One warp per row.
// launch: grid=ceil(rows / (block / 32)) block=256
extern "C" __global__ void trimat_fill(
    float* __restrict__ out,  // (B NH T, T)
    int T, long long rows, float value) {
    const long long row = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float* p = out + row * T;
    const int first = (int)(row % T) + 1, lane = threadIdx.x % 32;
    if (T % 4) {
        for (int j = first + lane; j < T; j += 32) p[j] = value;
        return;
    }
    const int aligned = (first + 3) / 4 * 4;  // first aligned column: up to 3 values come before it
    if (first + lane < aligned) p[first + lane] = value;
    for (int j = aligned + 4 * lane; j < T; j += 128) st_vec(p + j, make_float4(value, value, value, value));
}
