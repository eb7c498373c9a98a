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
// All codes, and those of Q4_K and Q5_K times s, are exact in float16. A code is put into the mantissa of 1024 or 64,
// which is then subtracted. The including file includes lib/sm80.cuh.
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
    static constexpr bool INTEGERS = WIDE && !HALVES;  // s are so small that q s is exact in float16
    static constexpr bool MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr bool FIVE = TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K;
    static constexpr int BITS = TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : FIVE ? 5 : 4;
    static constexpr int OFFSET = TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q8_0 ? 128 : TYPE == Q6_K ? 32 : 0;
    static constexpr int VECTORS = BITS == 8 ? 2 : 1;
    static constexpr int HIGH = BITS == 5 ? 4 : BITS == 6 ? 8 : 1;  // bytes of a lane
    static constexpr int LOW_BYTES = 512 * VECTORS, HIGH_BYTES = BITS == 5 || BITS == 6 ? 32 * HIGH : 0;
    static constexpr int UNITS = WIDE ? 2 : 1, ROW_SCALES = TYPE == Q6_K ? 18 : WIDE || MINIMUM ? 16 : 8;
    static constexpr int BYTES = UNITS * (LOW_BYTES + HIGH_BYTES) + OCTET * ROW_SCALES;
    static constexpr int SCALE = WIDE || MINIMUM ? 4 : 2;  // bytes of a lane

    Vec<W, 16> low[VECTORS];
    Vec<W, HIGH> high;
    Vec<W, SCALE> scale;
    Vec<W, 2> d;

    __host__ __device__ static constexpr int row_bytes(int K) {  // of an octet of rows
        return (K + UNITS * UNIT - 1) / (UNITS * UNIT) * BYTES;
    }

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

    // What the lane has of the scales: those of chunk t. halves: of blocks of 256 s and m, of others d and m. first,
    // second: d s, of Q6_K of both halves of the chunk. d, least: of a block of 256, d and -dmin.
    struct Own {
        float first, second, d, least;
        unsigned halves;
    };

    // All lanes of a warp call this.
    __device__ __forceinline__ Own own(int unit) const {
        const int half = unit % 2, t = threadIdx.x % 4;
        if constexpr (!WIDE) {
            return {floats_of((unsigned)scale.raw).x, 0.0f, 0.0f, 1.0f, (unsigned)scale.raw};
        } else if constexpr (HALVES) {
            const unsigned two = of_lane((unsigned)scale.raw, 2 * half + t / 2) >> t % 2 * 16;
            const float of_block = floats_of((unsigned)d.raw).x;
            return {of_block * (float)(signed char)(two & 255), of_block * (float)(signed char)(two >> 8 & 255)};
        } else {
            const float2 of_block = floats_of(of_lane((unsigned)scale.raw, 0));
            const int i = 4 * half + t;
            const unsigned s = of_lane((unsigned)scale.raw, 1), m = of_lane((unsigned)scale.raw, 2);
            const unsigned low = (s >> 4 * i & 15) | (m >> 4 * i & 15) << 16;
            const unsigned high = of_lane((unsigned)scale.raw, 3) >> 2 * i & 0x30003u;
            return {0.0f, 0.0f, of_block.x, -of_block.y, add2_fp16(low | high << 4 | 0x64006400u, 0xe400e400u)};
        }
    }

    // The codes of a chunk less OFFSET, as pairs of float16 in order. INTEGERS: times s, which is exact. halves: of
    // the chunk's lane.
    __device__ __forceinline__ void codes(int chunk, unsigned halves, unsigned (&pairs)[4]) const {
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
        pairs[0] = (first & 0xf000fu) | (up & ONES) | 0x64006400u;
        pairs[1] = (first & 0xf000f0u) | (up & ONES << 4) | 0x54005400u;
        pairs[2] = (second & 0xf000fu) | (down & ONES) | 0x64006400u;
        pairs[3] = (second & 0xf000f0u) | (down & ONES << 4) | 0x54005400u;
        unsigned by = 0, near = NEAR, far = FAR;
        if constexpr (INTEGERS) {
            by = twice(halves, 0);
            near = fma2_fp16(by, NEAR, 0x80008000u), far = fma2_fp16(by, FAR, 0x80008000u);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned less = i % 2 ? far : near;
            pairs[i] = INTEGERS ? fma2_fp16(pairs[i], by, less) : add2_fp16(pairs[i], less);
        }
    }

    // Float16 number `half`, 0 or 1, of two, as both.
    __device__ __forceinline__ static unsigned twice(unsigned halves, int half) {
        return __byte_perm(halves, 0u, half ? 0x3232 : 0x1010);
    }

    // The eight weights of a chunk, and where they are in K: four from k on, and four from next on.
    __device__ __forceinline__ void weights(int unit, int chunk, const Own& own, float (&v)[8], int& k,
                                            int& next) const {
        const float first = of_lane(own.first, chunk), second = of_lane(own.second, chunk);
        const unsigned halves = of_lane(own.halves, chunk);
        unsigned pairs[4];
        codes(chunk, halves, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 q = floats_of(pairs[i]);
            const float by = INTEGERS ? own.d : HALVES && i > 1 ? second : first;
            const float more = MINIMUM ? own.least * floats_of(halves).y : 0.0f;
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
