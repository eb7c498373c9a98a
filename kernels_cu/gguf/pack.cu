// Reorders the blocks of a GGUF file into the order in which kernels read them (lib/gguf.cuh), when a model is loaded.
//
//   raw (rows, bytes of a row): rows of blocks as in the file -> out: tiles of 8 rows by 128 or 256 along K
//
//   gguf_pack: reorders the blocks of a file for the kernels; a lane gathers the codes of 32 weights of a row byte by
//       byte. A warp packs 8 rows by 128 along K. It also computes a bound of the weights' magnitude from the scales
//
// In a file, a block's bytes are scales, high bits and low bits. The size of a block is often no multiple of 4:
//
//            bytes of a block
//   Q4_0     d[2]                           low[16]     low: byte i holds codes i and i + 16
//   Q4_1     d[2] m[2]                      low[16]
//   Q5_0     d[2]            fifth[4]       low[16]     fifth: the highest bit of each code
//   Q5_1     d[2] m[2]       fifth[4]       low[16]
//   Q8_0     d[2]                           code[32]    with a sign
//   MXFP4    exponent of d[1]               low[16]
//   Q4_K     d[2] dmin[2]    s and m[12]    low[128]    low: four times 32 bytes for two sub-blocks
//   Q5_K     d[2] dmin[2]    s and m[12]    fifth[32]   low[128]    fifth: bit s of byte i: code i of sub-block s
//   Q6_K     low[128]        upper[64]      s[16] d[2]              per 128 codes, byte i of low[64]: i, i + 64;
//                                                                   byte i of upper[32]: i, i + 32, i + 64, i + 96
//   INT4     d and z[4]                     low[16]     in no file: rows that files/checkpoints/four_bit.py writes
//   INT4_128 d and z[4]                     low[64]     low: as in four blocks of INT4
//
// A code takes one or two loads of a byte, whose cache lines stay in L1. The number of these loads bounds the kernel,
// not the memory bandwidth. The copy of the bytes from the host takes several times as long as the kernel.
//
// grid (ceil(rows / 8), ceil(tiles of 128 / warps per block)), block (a multiple of 32)
#define WEIGHT_GGUF 1
#define STORAGE_FP16 1
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/gguf.cuh"

#ifndef GGUF_TYPE
#define GGUF_TYPE 6
#endif

typedef gguf::Part<GGUF_TYPE> Part;

constexpr int SIZE = Part::WIDE ? 256 : Part::WHOLE ? 128 : 32;  // weights per block
constexpr int BLOCK_BYTES = Part::BYTES / gguf::ROW_GROUP * SIZE / (Part::UNITS * gguf::UNIT);
constexpr int SCALE = Part::WIDE || Part::FOUR ? 4 : Part::FP4 ? 1 : 2;  // bytes of scales per lane
constexpr int MAX_CODE = (1 << Part::BITS) - 1 - Part::OFFSET;
constexpr int FARTHEST = MAX_CODE > Part::OFFSET ? MAX_CODE : Part::OFFSET;  // largest |code - OFFSET|

// A block of a row in the file, or a block of zeros (from: null) that pads a tile.
struct Block {
    const W* from;

    __device__ __forceinline__ unsigned operator[](int i) const { return from ? __ldg(&from[i].bits) : 0u; }
    __device__ __forceinline__ unsigned two(int i) const { return (*this)[i] | (*this)[i + 1] << 8; }
    __device__ __forceinline__ unsigned four(int i) const { return two(i) | two(i + 2) << 16; }

    // Returns code i of the block, unsigned.
    __device__ __forceinline__ unsigned code(int i) const {
        constexpr int OWN = Part::WIDE ? 16 : SCALE, FIFTH = Part::FIVE ? SIZE / 8 : 0;
        const Block& b = *this;
        if constexpr (Part::BITS == 8) {
            return b[OWN + i] ^ 128u;
        } else if constexpr (Part::HALVES) {
            const int half = i / 128, quarter = i % 128 / 32, j = i % 32;
            const unsigned low = b[64 * half + quarter % 2 * 32 + j] >> quarter / 2 * 4 & 15;
            return low | (b[128 + 32 * half + j] >> 2 * quarter & 3) << 4;
        } else {
            const int each = Part::WIDE ? 32 : 16, part = i / each, j = i % each;
            const unsigned low = b[OWN + FIFTH + part / 2 * each + j] >> part % 2 * 4 & 15;
            if (!Part::FIVE) return low;
            return low | (Part::WIDE ? b[OWN + j] >> part & 1 : b[OWN + i / 8] >> i % 8 & 1) << 4;
        }
    }

    // Returns the 6-bit number s, or with `least` m, of sub-block i of Q4_K and Q5_K.
    __device__ __forceinline__ unsigned six(int i, bool least) const {
        const unsigned own = (*this)[(least ? 8 : 4) + i % 4];
        if (i < 4) return own & 63;
        return ((*this)[8 + i] >> (least ? 4 : 0) & 15) | own >> 6 << 4;
    }
};

// Returns word t of the scales of a row of Q4_K and Q5_K, in the order in which kernels read scales.
__device__ __forceinline__ unsigned scale_word(const Block& b, int t) {
    if (t == 0) return b.four(0);
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int of = t == 2 ? i + 4 : i;
        const unsigned m = b.six(of, true);
        word |= (t == 3 ? (m & 15) | (b.six(i + 4, true) & 15) << 4 : b.six(of, false) | m >> 4 << 6) << 8 * i;
    }
    return word;
}

// Returns a bound of a weight's magnitude, |d s| FARTHEST + |dmin m|, as the bits of a float, rounded as in
// gpt2block.models.weights.gguf. As an integer, NaN is larger than any number.
__device__ __forceinline__ int magnitude(float2 d, float s, float m) {
    const float sum = __fadd_rn(__fmul_rn(fabsf(__fmul_rn(d.x, s)), (float)FARTHEST), fabsf(__fmul_rn(d.y, m)));
    return __float_as_int(sum) & 0x7fffffff;
}

// Returns the bound for chunk t (32 weights) of a unit (128 weights): the maximum over the chunk's one or two
// sub-blocks.
__device__ __forceinline__ int magnitude_of_chunk(const Block& b, int unit, int t) {
    const int i = unit % 2 * 4 + t;
    if constexpr (Part::HALVES) {
        const float2 d = {gguf::floats_of(b.two(208)).x, 0.0f};
        const int first = magnitude(d, (float)(signed char)b[192 + 2 * i], 0.0f);
        return max(first, magnitude(d, (float)(signed char)b[193 + 2 * i], 0.0f));
    } else if constexpr (Part::WIDE) {
        return magnitude(gguf::floats_of(b.four(0)), (float)b.six(i, false), (float)b.six(i, true));
    } else if constexpr (Part::ZERO) {
        const float d = __int_as_float((int)(b.four(0) & ~255u));
        return magnitude({d, d}, 1.0f, (float)(b.four(0) & 255u));
    } else if constexpr (Part::FP4) {
        return (int)min((b[0] + 2) << 23 | 0x400000u, 0x7f800000u);  // 12 d or infinity; d can be subnormal
    } else {
        return magnitude(gguf::floats_of(Part::MINIMUM ? b.four(0) : b.two(0)), 1.0f, 1.0f);
    }
}

// Returns the row of the file for a row of out. In the heads of q and k, RoPE's pairs are neighbouring rows in the
// file, but half a head apart in out. With 8 rows per head:
//
//   row of out      0 1 2 3 4 5 6 7
//   row in file     0 2 4 6 1 3 5 7
__device__ __forceinline__ int row_in_file(int row, int head, int in_heads) {
    if (row >= in_heads) return row;
    const int i = row % head, half = head / 2;
    return row - i + i % half * 2 + i / half;
}

// Launched by operation (variant): gemm (gguf pack)
extern "C" __global__ void gguf_pack(
    const W* __restrict__ raw,  // (rows, bytes of a row)
    W* out,                     // tiles of eight rows, padded with zeros
    int* largest,               // the largest bound of a weight's magnitude: bits of a float >= 0
    int K, int rows,            // K: a multiple of the weights per block
    int head, int in_heads) {   // head: rows per head; in_heads: number of first rows that are heads
    const int lane = threadIdx.x % 32, t = lane % 4, row = blockIdx.x * gguf::ROW_GROUP + lane / 4;
    const int unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, tile = unit / Part::UNITS;
    if (tile * Part::UNITS * gguf::UNIT >= K) return;
    const W* from = row < rows ? raw + (long long)row_in_file(row, head, in_heads) * (K / SIZE) * BLOCK_BYTES : nullptr;
    const auto block_of = [&](int k) { return Block{from && k < K ? from + k / SIZE * BLOCK_BYTES : nullptr}; };

    unsigned low[4 * Part::VECTORS] = {}, high[2] = {};
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        const int k = unit * gguf::UNIT + chunk * 32;
        const Block block = block_of(k);
        // Code i of lane t is the code of weight j of the chunk, in the bits from `at` on (for codes of 4 bits):
        //   i    0    1       2       3       4        5        6        7
        //   j    2 t  2 t + 1 2 t + 8 2 t + 9 2 t + 16 2 t + 17 2 t + 24 2 t + 25
        //   at   0    16      4       20      8        24       12       28
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int j = i / 2 * 8 + 2 * t + i % 2, at = i % 2 * 16 + i / 2 * 4;
            const unsigned code = block.code(k % SIZE + j);
            if constexpr (Part::BITS == 8) low[2 * chunk + i / 4] |= code << i % 4 * 8;
            else low[chunk] |= (code & 15) << at;
            if (Part::BITS == 5) high[0] |= code >> 4 << (at + chunk);
            if (Part::BITS == 6) high[chunk / 2] |= code >> 4 << (at + chunk % 2 * 2);
        }
    }
    W* to = out + (long long)blockIdx.x * Part::row_bytes(K) + tile * Part::BYTES;
    W* codes = to + unit % Part::UNITS * Part::LOW_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < 4 * Part::VECTORS; i += 4) {
        *reinterpret_cast<uint4*>(codes + 128 * i) = make_uint4(low[i], low[i + 1], low[i + 2], low[i + 3]);
    }
    to += Part::UNITS * Part::LOW_BYTES;
    W* more = to + unit % Part::UNITS * Part::HIGH_BYTES + lane * Part::HIGH;
    if (Part::BITS == 5) *reinterpret_cast<unsigned*>(more) = high[0];
    if (Part::BITS == 6) *reinterpret_cast<uint2*>(more) = make_uint2(high[0], high[1]);

    const Block own = block_of(unit * gguf::UNIT + t * 32);
    to += Part::UNITS * Part::HIGH_BYTES;
    W* scale = to + lane * SCALE;
    if constexpr (SCALE == 1) {
        *reinterpret_cast<unsigned char*>(scale) = own[0];
    } else if constexpr (SCALE == 2) {
        *reinterpret_cast<unsigned short*>(scale) = own.two(0);
    } else if constexpr (Part::WHOLE) {
        if (t == 0) *reinterpret_cast<unsigned*>(to + lane) = own.four(0);
    } else if constexpr (!Part::WIDE) {
        *reinterpret_cast<unsigned*>(scale) = own.four(0);
    } else if (unit % 2 == 0) {
        *reinterpret_cast<unsigned*>(scale) = Part::HALVES ? own.four(192 + 4 * t) : scale_word(own, t);
        if (Part::HALVES && t == 0) *reinterpret_cast<unsigned short*>(to + 128 + lane / 2) = own.two(208);
    }

    int most = magnitude_of_chunk(own, unit, t);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
    }
    if (lane == 0) atomicMax(largest, most);
}
