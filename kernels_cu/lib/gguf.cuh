// Weights that stay as a GGUF file has them: integer codes q of 4 to 8 bits with scales.
//
//            block  sub-blocks  a weight             bits of q
//   Q4_0     32     1           d (q - 8)            4
//   Q4_1     32     1           d q + m              4
//   Q5_0     32     1           d (q - 16)           5
//   Q5_1     32     1           d q + m              5
//   Q8_0     32     1           d (q - 128)          8
//   Q4_K     256    8           d s q - dmin m       4      d and dmin: one of a block
//   Q5_K     256    8           d s q - dmin m       5      s and m: 6 bits, of a sub-block of 32
//   Q6_K     256    16          d s (q - 32)         6      s: 8 bits with a sign, of a sub-block of 16
//
// d, m of Q4_1 and Q5_1, and dmin are float16. The bytes are those of a file in the order in which mma.sync wants them,
// as gpt2block.weights.gguf packs them. A tile is 8 rows by 128 of K; lane 4 g + t has of row g, of each chunk of 32 of
// K, the eight codes from 8 t on (Q6_K: from 4 t on in either half of 16), two for each step of an mma:
//
//   tile     [ 32 lanes x 4 words: low 4 bits ] [ 32 lanes x 4 or 8 bytes: high bits ] [ 8 rows: scales ]
//   word     of a chunk, codes by their number:  bits 0-15: 0 2 4 6    bits 16-31: 1 3 5 7    of 4 bits each
//
// Q8_0 has 32 lanes x 16 bytes twice, for two chunks each. Types with blocks of 256 have two tiles of low bits, two of
// high bits, and scales for both. Rows are filled up to whole tiles with zeros; eight rows follow each other.
//
// All codes are exact in float16: they are put into the mantissa of 1024 or 64, which is then subtracted. The including
// file includes lib/sm80.cuh.
#pragma once
#include "lib/stream.cuh"

namespace gguf {

enum Type { Q4_0 = 1, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

constexpr int UNIT = 128, OCTET = 8;

__device__ __forceinline__ float2 floats_of(unsigned halves) {
    float v[2];
    unpack2_fp16(halves, v);
    return {v[0], v[1]};
}

// A value of lane `from` of the four that have a row.
template <typename Value>
__device__ __forceinline__ Value of_lane(Value value, int from) { return __shfl_sync(0xffffffffu, value, from, 4); }

// A lane's part of a tile: 32 weights of a row.
template <int TYPE>
struct Part {
    static constexpr bool WIDE = TYPE >= Q4_K, HALVES = TYPE == Q6_K;  // blocks of 256; sub-blocks of 16
    static constexpr bool MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr int BITS = TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K ? 5 : 4;
    static constexpr int OFFSET = TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q8_0 ? 128 : TYPE == Q6_K ? 32 : 0;
    static constexpr int VECTORS = BITS == 8 ? 2 : 1, HIGH = BITS == 5 ? 4 : BITS == 6 ? 8 : 1;  // HIGH: bytes of a lane
    static constexpr int LOW_BYTES = 512 * VECTORS, HIGH_BYTES = BITS == 5 || BITS == 6 ? 32 * HIGH : 0;
    static constexpr int UNITS = WIDE ? 2 : 1, ROW_SCALES = TYPE == Q6_K ? 18 : WIDE || MINIMUM ? 16 : 8;
    static constexpr int BYTES = UNITS * (LOW_BYTES + HIGH_BYTES) + OCTET * ROW_SCALES;
    static constexpr int SCALE = WIDE || MINIMUM ? 4 : 2;  // bytes of a lane

    Vec<W, 16> low[VECTORS];
    Vec<W, HIGH> high;
    Vec<W, SCALE> scale;
    Vec<W, 2> d;

    __host__ __device__ static constexpr int row_bytes(int K) { return (K + UNITS * UNIT - 1) / (UNITS * UNIT) * BYTES; }

    // Loads 128 of K of `row`; w: all rows of this type.
    __device__ __forceinline__ void load(const W* w, int K, int row, int unit) {
        const int lane = row % OCTET * 4 + threadIdx.x % 4;
        const W* tile = w + (long long)(row / OCTET) * row_bytes(K) + unit / UNITS * BYTES;
        const W* codes = tile + unit % UNITS * LOW_BYTES + lane * 16;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) low[i] = stream_in<Vec<W, 16>>(codes + 512 * i);
        tile += UNITS * LOW_BYTES;
        if (HIGH_BYTES) high = stream_in<Vec<W, HIGH>>(tile + unit % UNITS * HIGH_BYTES + lane * HIGH);
        tile += UNITS * HIGH_BYTES;
        scale = stream_in<Vec<W, SCALE>>(tile + lane * SCALE);
        if (HALVES) d = stream_in<Vec<W, 2>>(tile + 128 + row % OCTET * 2);
    }

    __device__ __forceinline__ void clear() { *this = {}; }

    // The lane's scales, those of chunk t: scale and -minimum, or of Q6_K those of both halves. All lanes of a warp
    // call this.
    __device__ __forceinline__ float2 scales(int unit) const {
        const int half = unit % 2, t = threadIdx.x % 4;
        if constexpr (!WIDE) return floats_of((unsigned)scale.raw);
        if constexpr (HALVES) {
            const unsigned word = of_lane((unsigned)scale.raw, 2 * half + t / 2) >> t % 2 * 16;
            const float of_block = floats_of((unsigned)d.raw).x;
            return {of_block * (float)(signed char)(word & 255), of_block * (float)(signed char)(word >> 8 & 255)};
        }
        const float2 of_block = floats_of(of_lane((unsigned)scale.raw, 0));
        const int i = 4 * half + t;
        const unsigned s = of_lane((unsigned)scale.raw, 1), m = of_lane((unsigned)scale.raw, 2);
        const unsigned high = of_lane((unsigned)scale.raw, 3) >> 2 * i;
        const unsigned six = (s >> 4 * i & 15) | (high & 3) << 4, least = (m >> 4 * i & 15) | (high >> 16 & 3) << 4;
        return {of_block.x * (float)six, -of_block.y * (float)least};
    }

    // The codes of a chunk less OFFSET, as pairs of float16 in order.
    __device__ __forceinline__ void codes(int chunk, unsigned (&pairs)[4]) const {
        constexpr unsigned NEAR = 0xe400e400u + OFFSET * 0x10001u, FAR = 0xd400d400u + OFFSET * 0x100010u;
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned four = word(low[chunk / 2], chunk % 2 * 2 + i);
                pairs[2 * i] = add2_fp16(__byte_perm(four, 0x64646464u, 0x4140), NEAR);
                pairs[2 * i + 1] = add2_fp16(__byte_perm(four, 0x64646464u, 0x4342), NEAR);
            }
            return;
        }
        const unsigned first = word(low[0], chunk), second = first >> 8;
        unsigned up = 0, down = 0;  // high bits, above the low ones of pairs 0 and 1, and of 2 and 3
        constexpr unsigned ONES = BITS == 6 ? 0x300030u : 0x100010u;
        if constexpr (BITS == 5) up = (unsigned)high.raw << (4 - chunk), down = (unsigned)high.raw >> (4 + chunk);
        if constexpr (BITS == 6) {
            const unsigned bits = chunk < 2 ? high.raw.x : high.raw.y;
            up = bits << (4 - chunk % 2 * 2), down = bits >> (4 + chunk % 2 * 2);
        }
        up = BITS == 4 ? 0 : up, down = BITS == 4 ? 0 : down;
        pairs[0] = add2_fp16((first & 0xf000fu) | (up & ONES) | 0x64006400u, NEAR);
        pairs[1] = add2_fp16((first & 0xf000f0u) | (up & ONES << 4) | 0x54005400u, FAR);
        pairs[2] = add2_fp16((second & 0xf000fu) | (down & ONES) | 0x64006400u, NEAR);
        pairs[3] = add2_fp16((second & 0xf000f0u) | (down & ONES << 4) | 0x54005400u, FAR);
    }

    // The eight weights of a chunk, and where they are in K: four from k on, and four from next on.
    __device__ __forceinline__ void weights(int unit, int chunk, float2 own, float (&v)[8], int& k, int& next) const {
        const float first = of_lane(own.x, chunk), second = of_lane(own.y, chunk);
        unsigned pairs[4];
        codes(chunk, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 q = floats_of(pairs[i]);
            const float by = HALVES && i > 1 ? second : first, more = MINIMUM ? second : 0.0f;
            v[2 * i] = fmaf(by, q.x, more), v[2 * i + 1] = fmaf(by, q.y, more);
        }
        const int t = threadIdx.x % 4;
        k = unit * UNIT + chunk * 32 + (HALVES ? 4 : 8) * t, next = k + (HALVES ? 16 : 4);
    }

   private:
    __device__ __forceinline__ static unsigned word(const Vec<W, 16>& v, int i) {
        return i == 0 ? v.raw.x : i == 1 ? v.raw.y : i == 2 ? v.raw.z : v.raw.w;
    }
};

}  // namespace gguf
