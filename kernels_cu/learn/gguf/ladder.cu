// Product with Q4_K weights of a GGUF file (blocks of 4-bit codes): out = x W^T, from one thread per output to
// mma.sync.
//
//   x (M, K)   w (N, K / 256, 144): a block is 256 weights of a row in 144 bytes, as in a file   out (M, N)
//
//   block        [ d | dmin | s and m of 8 sub-blocks | codes q of 256 weights, 4 bits each ]
//   bytes           2     2             12                            128
//
//   a weight     d s q - dmin m      d and dmin: float16, one each per block. s and m: 6 bits, per sub-block of 32
//   32 products  d s (sum of q x) - dmin m (sum of x)
//
// 32 bytes of codes belong to two sub-blocks: the lower halves of the bytes are the codes of one sub-block, the upper
// halves the codes of the next one. Each variant adds one idea to the previous one:
//
//   blocks_matmul_naive: one thread per output, which decodes one weight after the other
//   blocks_matmul_warp: one warp per output, 16-byte loads of 32 codes; scales multiply sums of q x and of x. The lanes
//       of a warp read neighbouring bytes
//   blocks_matmul_mma: tensor cores (mma.sync), x in float16: products with the integers q s and m are exact, d and
//       dmin multiply their sums. Each code is unpacked only once for 8 rows of x
//
// The kernels of a model read the same weights in another order (lib/gguf.cuh), in which one load brings the codes for
// eight steps of the tensor cores.
#include "lib/common.cuh"
#include "lib/storage.cuh"
#include "lib/sm80.cuh"

constexpr int SIZE = 256, BYTES = 144;  // weights and bytes of a block
constexpr int HEAD = 16;                // bytes of a block before its codes

__device__ __forceinline__ float2 floats_of(unsigned halves) {
    float v[2];
    unpack2_fp16(halves, v);
    return {v[0], v[1]};
}

// Returns s and m of sub-block i. s and m of the first four sub-blocks are the lower 6 bits of a byte each. The upper 2
// bits of these bytes are the upper bits of s and m of the last four sub-blocks, whose lower 4 bits are in the last
// word of the head.
__device__ __forceinline__ float2 scales(const uint4& head, int i) {
    const int at = i % 4 * 8;
    const unsigned s = head.y >> at, m = head.z >> at, low = head.w >> at;
    if (i < 4) return {(float)(s & 63), (float)(m & 63)};
    return {(float)((low & 15) | (s >> 6 & 3) << 4), (float)((low >> 4 & 15) | (m >> 6 & 3) << 4)};
}

// launch: grid=ceil(M * N / block) block=128
extern "C" __global__ void blocks_matmul_naive(
    const T* __restrict__ x,              // (M, K)
    const unsigned char* __restrict__ w,  // (N, K / 256, 144)
    float* __restrict__ out,              // (M, N)
    int M, int N, int K) {
    const long long output = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (output >= (long long)M * N) return;
    const T* x_row = x + output / N * K;
    const unsigned char* w_row = w + output % N * (K / SIZE * BYTES);
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) {
        const unsigned char* block = w_row + k / SIZE * BYTES;
        const uint4 head = *reinterpret_cast<const uint4*>(block);
        const int i = k % SIZE / 32;  // index of the sub-block
        const int q = block[HEAD + i / 2 * 32 + k % 32] >> i % 2 * 4 & 15;
        const float2 d = floats_of(head.x), s = scales(head, i);
        sum += (d.x * s.x * q - d.y * s.y) * widen(x_row[k]);
    }
    out[output] = sum;
}

// Eight lanes read a block: lane 2 p + h reads bytes 16 h to 16 h + 15 of pair p of sub-blocks.
// launch: grid=ceil(M * N / (block / 32)) block=256
extern "C" __global__ void __launch_bounds__(256) blocks_matmul_warp(
    const T* __restrict__ x,              // (M, K)
    const unsigned char* __restrict__ w,  // (N, K / 256, 144)
    float* __restrict__ out,              // (M, N)
    int M, int N, int K) {
    const int lane = threadIdx.x % 32, pair = lane % 8 / 2, half = lane % 2;
    const long long output = blockIdx.x * (long long)(blockDim.x / 32) + threadIdx.x / 32;
    if (output >= (long long)M * N) return;
    const T* x_row = x + output / N * K + 64 * pair + 16 * half;
    const unsigned char* w_row = w + output % N * (K / SIZE * BYTES);
    float sum = 0.0f;
    for (int k = lane / 8 * SIZE; k < K; k += 4 * SIZE) {
        const uint4* block = reinterpret_cast<const uint4*>(w_row + k / SIZE * BYTES);
        const uint4 head = block[0], codes = block[1 + lane % 8];
        const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
        const float2 d = floats_of(head.x);
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // j: sub-block of the pair
            float of_codes = 0.0f, of_x = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v[4];
                Vec<T, 4>::load(x_row + k + 32 * j + 4 * i).unpack(v);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    of_codes += (float)(words[i] >> (8 * e + 4 * j) & 15) * v[e];
                    of_x += v[e];
                }
            }
            const float2 s = scales(head, 2 * pair + j);
            sum += d.x * (s.x * of_codes) - d.y * (s.y * of_x);
        }
    }
    sum = lanes_sum<32>(sum);
    if (lane == 0) out[output] = sum;
}

// Multiplies the codes q in four bytes by s, as pairs of float16: first receives codes 0 and 1, second codes 2 and 3. A
// code in the lowest bits of the float16 number 1024 gives 1024 + q, from which 1024 is subtracted.
__device__ __forceinline__ void times_scale(unsigned codes, unsigned s, unsigned& first, unsigned& second) {
    first = multiply2(add2_fp16(__byte_perm(codes, 0x64646464u, 0x4140), 0xe400e400u), s);
    second = multiply2(add2_fp16(__byte_perm(codes, 0x64646464u, 0x4342), 0xe400e400u), s);
}

// A warp computes 16 outputs of 8 rows of x. Lane 4 g + t holds codes 8 t to 8 t + 7 of each sub-block for outputs g
// and g + 8, and the values of row g of x at the same positions along K. Products along K may be added in any order.
// launch: grid=ceil(N / 64) * ceil(M / 8) block=128
extern "C" __global__ void __launch_bounds__(128) blocks_matmul_mma(
    const T* __restrict__ x,              // (M, K), float16
    const unsigned char* __restrict__ w,  // (N, K / 256, 144)
    float* __restrict__ out,              // (M, N)
    int M, int N, int K) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, across = (N + 63) / 64;
    const int n = blockIdx.x % across * 64 + threadIdx.x / 32 * 16, m = blockIdx.x / across * 8;
    const long long row_bytes = K / SIZE * BYTES;
    const T* x_row = x + (long long)min(m + g, M - 1) * K + 8 * t;  // rows after the last row repeat it
    const unsigned char* w_rows[2] = {w + min(n + g, N - 1) * row_bytes, w + min(n + g + 8, N - 1) * row_bytes};
    float sum[4] = {};
    for (int k = 0; k < K; k += SIZE) {
        uint4 head[2];
        float of_codes[4] = {}, of_x[4] = {};  // of_codes: sums of s q x; of_x: sums of m x
#pragma unroll
        for (int r = 0; r < 2; ++r) head[r] = *reinterpret_cast<const uint4*>(w_rows[r] + k / SIZE * BYTES);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            uint2 codes[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const unsigned char* block = w_rows[r] + k / SIZE * BYTES;
                codes[r] = *reinterpret_cast<const uint2*>(block + HEAD + 32 * pair + 8 * t);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {  // j: sub-block of the pair, two steps of 16 along K
                unsigned first[4], second[4], least[4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float2 s = scales(head[r], 2 * pair + j);
                    const unsigned both = pack2_fp16(s.x, s.x);
                    times_scale(codes[r].x >> 4 * j & 0x0f0f0f0fu, both, first[r], first[r + 2]);
                    times_scale(codes[r].y >> 4 * j & 0x0f0f0f0fu, both, second[r], second[r + 2]);
                    least[r] = least[r + 2] = pack2_fp16(s.y, s.y);
                }
                const uint4 v = *reinterpret_cast<const uint4*>(x_row + k + 64 * pair + 32 * j);
                const unsigned x_first[2] = {v.x, v.y}, x_second[2] = {v.z, v.w};
                mma_fp16(of_codes, first, x_first);
                mma_fp16(of_codes, second, x_second);
                mma_fp16(of_x, least, x_first);
                mma_fp16(of_x, least, x_second);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 d = floats_of(head[i / 2].x);
            sum[i] += d.x * of_codes[i] - d.y * of_x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = m + 2 * t + i % 2, output = n + g + i / 2 * 8;
        if (row < M && output < N) out[(long long)row * N + output] = sum[i];
    }
}
