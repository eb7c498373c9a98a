// Trimat with pipelined copies (the variant after learn/trimat/ladder.cu): out[b,h,i,j] = Q_i . K_j / sqrt(HS) for j <=
// i.
//
//   qkv (B, T, 3, NH, HS)   Q and K are used; consecutive rows of a head (HS values each) are 3 NH HS values apart
//   out (B, NH, T, T)       above the diagonal, up to 3 values per row next to it are written, no other values
//
//   matmul_tri5: two buffers and cp.async, a grid of needed tiles only, no bank conflicts
//
// As in matmul_tri4, a block of 256 threads computes a 128x128 tile, 8x8 sums per thread. The differences:
//
//   - The grid has only the tiles on and below the diagonal. In a tile on the diagonal, two warps have parts (32x64)
//     that lie above the diagonal; these warps do nothing. At T = 1024 this saves 2 of 36 tiles.
//     (Also skipping halves of parts, which saves 3, was 1.5 % slower: a block waits for its slowest warp.)
//   - Slices of 16 values use two buffers: the next slice is copied (cp.async, bypassing registers) while the current
//     slice is multiplied, with one barrier per slice.
//   - Rows are padded to 20 floats. Rows, columns and threads are arranged so that reads of shared memory (16 reads
//     of 16 bytes for 256 multiply-adds) have no bank conflicts, and a warp's store fills four 128-byte lines.
//   - Streaming stores leave the L2 cache to Q and K, which are read again.
//
//   a thread's outputs in the 32x64 part of its warp:   rows 4 r + ty            (r = 0..7, ty = 0..3)
//                                                       columns 32 g + 4 tx + e  (g = 0, 1; tx = 0..7; e = 0..3)
//
// Block (256), grid (n (n + 1) / 2, B NH) with n = ceil(T / 128). Any T; HS is a multiple of 4. qkv and out are aligned
// to 16 bytes. Before sm_80 there is no cp.async: the next slice is copied synchronously, through registers.
#include "lib/copies.cuh"
#include "lib/triangle.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef HS
#define HS 64
#endif
static_assert(NH > 0 && HS > 0 && HS % 4 == 0, "rows are read as float4: HS must be a multiple of 4");

constexpr int ROW = 3 * NH * HS;  // floats between consecutive rows of a head
constexpr int TILE = 128;
constexpr int SLICE = 16;
constexpr int STRIDE = SLICE + 4;  // 8 consecutive rows start in 8 different groups of 4 banks
constexpr int BUFFER = TILE * STRIDE;

__device__ __forceinline__ void st_stream(float* p, float4 v) { __stcs(reinterpret_cast<float4*>(p), v); }

// Adds a slice's products to the thread's sums. lhs and rhs point to the thread's first rows of Q and K in shared
// memory. Further rows of lhs are 4 apart, further rows of rhs 8 apart; a group of 4 columns spans 32 rows of rhs.
__device__ __forceinline__ void add_slice(float (&sum)[8][8], const float* lhs, const float* rhs) {
    constexpr int COLUMNS = 8;
#pragma unroll 1
    for (int s = 0; s < SLICE; s += 4) {
        float4 b[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) b[c] = ld_vec(rhs + 8 * c * STRIDE + s);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const float4 a = ld_vec(lhs + 4 * r * STRIDE + s);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a.x * b[c].x;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a.y * b[c].y;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a.z * b[c].z;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a.w * b[c].w;
        }
    }
}

// Stores the values on or below the diagonal. The thread's first output is out[row][column]. With VECTORS, every row of
// out is aligned to 16 bytes, and the float4 that contains the diagonal is stored whole.
template <bool VECTORS>
__device__ __forceinline__ void store(float* out, const float (&sum)[8][8], int row, int column, int T) {
    const float scale = 1.0f / sqrtf((float)HS);  // a compile-time constant
    float* first = out + (long long)row * T + column;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int last = row + 4 * r < T ? row + 4 * r - column : -1;  // column of the diagonal, relative to `column`
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            const float* v = sum[r] + 4 * g;
            float* p = first + (long long)(4 * r) * T + 32 * g;
            if (VECTORS) {
                if (32 * g <= last) st_stream(p, make_float4(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale));
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (32 * g + e <= last) p[e] = v[e] * scale;
                }
            }
        }
    }
}

// launch: grid=ceil(T / 128) * (ceil(T / 128) + 1) / 2, B * NH block=256
extern "C" __global__ void __launch_bounds__(256, 2) matmul_tri5(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T) {
    __shared__ __align__(16) float lhs_s[4 * BUFFER];  // two buffers for Q, each BUFFER floats
    float* const rhs_s = lhs_s + 2 * BUFFER;           // two buffers for K

    // The tile number t = i (i + 1) / 2 + j counts the head's tiles row by row; row i has i + 1 tiles.
    const int t = blockIdx.x, i = triangle_row(t);
    const int tile_i = TILE * i, tile_j = TILE * (t - i * (i + 1) / 2);

    // This thread copies float4 number copy_v of two rows of each operand, 64 rows apart. Eight threads at a time write
    // to two rows 4 apart, in 8 different groups of 4 banks. Column 4 tx + e of each 32 columns is stored in row 8 e +
    // tx, so that neighbouring threads read neighbouring rows. Rows after the end of the sequence are not copied; their
    // products use arbitrary values and are not stored.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int copy_v = lane % 4, copy_row = 8 * warp + lane / 4 % 2 * 4 + lane / 8;
    const int copy_column = copy_row / 32 * 32 + copy_row % 8 * 4 + copy_row % 32 / 8;
    float* copy_to = lhs_s + copy_row * STRIDE + 4 * copy_v;
    const int q_row = tile_i + copy_row, k_row = tile_j + copy_column;
    const long long b = blockIdx.y / NH, h = blockIdx.y % NH;
    const float* q = qkv + (b * T + q_row) * ROW + h * HS + 4 * copy_v;
    const float* k = qkv + (b * T + k_row) * ROW + (NH + h) * HS + 4 * copy_v;
    auto copy_slice = [&](int s0) {
        if (HS % SLICE == 0 || s0 + 4 * copy_v < HS) {
            if (q_row < T) copy_vec(copy_to, q);
            if (q_row + 64 < T) copy_vec(copy_to + 64 * STRIDE, q + 64 * ROW);
            if (k_row < T) copy_vec(copy_to + 2 * BUFFER, k);
            if (k_row + 64 < T) copy_vec(copy_to + 2 * BUFFER + 64 * STRIDE, k + 64 * ROW);
        } else {  // the last slice, if HS is not a multiple of 16
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            st_vec(copy_to, zero);
            st_vec(copy_to + 64 * STRIDE, zero);
            st_vec(copy_to + 2 * BUFFER, zero);
            st_vec(copy_to + 2 * BUFFER + 64 * STRIDE, zero);
        }
        q += SLICE;
        k += SLICE;
    };

    // This thread's outputs. A hex digit of the constant gives the part (2 * row + column) that a warp computes. Warps
    // w and w + 4 share a scheduler; in a tile on the diagonal, at most one of them is idle. The lane's bits are
    // permuted so that each half of a warp reads 8 different rows of rhs and 2 of lhs.
    const int part = 0x35104276 >> 4 * warp & 7;
    const int tx = (lane & 1) | (lane >> 1 & 6), ty = (lane >> 1 & 1) | (lane >> 3 & 2);
    const int row0 = 32 * (part / 2), column0 = 64 * (part % 2);
    const bool needed = tile_j + column0 <= tile_i + row0 + 31 && tile_i + row0 < T;
    const float* lhs = lhs_s + (row0 + ty) * STRIDE;
    const float* rhs = rhs_s + (column0 + tx) * STRIDE;
    float sum[8][8] = {};

    copy_slice(0);
    int to_next = BUFFER;
#pragma unroll 1
    for (int s0 = 0; s0 < HS; s0 += SLICE) {
        wait_for_copies();
        __syncthreads();  // the slice is complete; the previous one has been read, so its buffer can be filled
        copy_to += to_next;
        if (s0 + SLICE < HS) copy_slice(s0 + SLICE);
        if (needed) {
            add_slice(sum, lhs, rhs);
            lhs += to_next;
            rhs += to_next;
        }
        to_next = -to_next;
    }

    float* head = out + (long long)blockIdx.y * T * T;
    if (T % 4 == 0) {
        store<true>(head, sum, tile_i + row0 + ty, tile_j + column0 + 4 * tx, T);
    } else {
        store<false>(head, sum, tile_i + row0 + ty, tile_j + column0 + 4 * tx, T);
    }
}
