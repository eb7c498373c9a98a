// Weights in quantized blocks, as in GGUF files: integer codes q of 4 to 8 bits, with scales.
//
//            block  sub-blocks  a weight             bits of q
//   Q4_0     32     1           d (q - 8)            4
//   Q4_1     32     1           d q + m              4
//   Q5_0     32     1           d (q - 16)           5
//   Q5_1     32     1           d q + m              5
//   Q8_0     32     1           d (q - 128)          8
//   Q4_K     256    8           d s q - dmin m       4      d and dmin: one of each per block
//   Q5_K     256    8           d s q - dmin m       5      s and m: 6 bits, per sub-block of 32
//   Q6_K     256    16          d s (q - 32)         6      s: 8 bits with a sign, per sub-block of 16
//   MXFP4    32     1           d f(q)               4      f: twice the number of FP4 (E2M1) with the bits q
//   INT4     32     1           d (q - z)            4      z: an integer from 0 to 16; not a type of GGUF files
//   INT4_128 128    1           d (q - z)            4      as INT4
//
// d, m of Q4_1 and Q5_1, and dmin are float16. d of INT4 and INT4_128 is a float32 whose low 8 bits hold z: it has at
// most 11 significant bits, as it was a float16 or bfloat16 number. A row of INT4_128 has one d in a tile. d of MXFP4
// is a power of two, of which a byte holds the exponent plus 128.
//
// gguf.py in gpt2block/models/weights reorders the bytes of a file into the fragment layout of mma.sync. A tile is 8
// rows by 128 values along K. From row g (0..7) and each chunk of 32 values along K, lane 4 g + t (t = 0..3) holds the
// codes at positions 2 t and 2 t + 1 of each group of eight values. Two such pairs are the lane's operand of one mma
// instruction.
//
//   tile     [ 32 lanes x 4 words: low 4 bits ] [ 32 lanes x 4 or 8 bytes: high bits ] [ 8 rows: scales ]
//   word     codes of one chunk, 4 bits each: bits 0-15 hold codes 0, 2, 4, 6, and bits 16-31 codes 1, 3, 5, 7
//
// A tile of Q8_0 has two arrays of 32 lanes x 16 bytes in place of low and high bits, each for two chunks. Types with
// blocks of 256 values have tiles of 256 values along K: the low bits of both halves, then the high bits of both
// halves, then the scales. Rows are padded with zeros to whole tiles. All tiles of eight rows are followed by the tiles
// of the next eight rows. The scales of a row of Q4_K and Q5_K are four words. Lane t uses byte t of each word after
// the first:
//
//   [ d, dmin ] [ s of sub-blocks 0-3, with m >> 4 in the upper bits ] [ s and m >> 4 of sub-blocks 4-7 ]
//   [ m & 15 of sub-blocks 0-3, with m & 15 of sub-blocks 4-7 in the upper bits ]
//
// All codes, and the products of codes of Q4_K and Q5_K with s, are exact in float16. To convert a code, its bits are
// put into the mantissa of the float16 number 1024 or 64, and 1024 or 64 is then subtracted. A code that is multiplied
// by s needs no subtraction: its bits are the mantissa of a subnormal number. Sign, exponent and mantissa of FP4 become
// those of a float16 number, which is 2^15 times smaller than f(q).
//
// The including file includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"

namespace gguf {

enum Type { Q4_0 = 1, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4, INT4_128, MXFP4 };

constexpr int UNIT = 128, ROW_GROUP = 8;

__device__ __forceinline__ float2 floats_of(unsigned halves) {
    float v[2];
    unpack2_fp16(halves, v);
    return {v[0], v[1]};
}

// Returns 2^(exponent - 128), the scale of a block of MXFP4, or 0 if this number is subnormal.
__device__ __forceinline__ float power_of_two(unsigned exponent) {
    return __int_as_float((int)(max(exponent, 1u) - 1) << 23);
}

// Returns `value` of lane `from`, one of the four neighbouring lanes that hold a row of weights.
template <typename Value>
__device__ __forceinline__ Value of_lane(Value value, int from) { return __shfl_sync(0xffffffffu, value, from, 4); }

// Puts a lane's four pairs of weights, from a chunk of 32 values of row g (i = 0) or g + 8 (i = 1), into the registers
// `steps` of operand A of two mma instructions.
__device__ __forceinline__ void place(const unsigned (&pairs)[4], int i, unsigned (&steps)[2][4]) {
    steps[0][i] = pairs[0], steps[0][i + 2] = pairs[1], steps[1][i] = pairs[2], steps[1][i + 2] = pairs[3];
}

// A lane's part of a GGUF tile (8 rows by 128 values along K): 32 weights of one row.
template <int TYPE>
struct Part {
    static constexpr bool WIDE = TYPE >= Q4_K && TYPE <= Q6_K;  // blocks have 256 weights
    static constexpr bool HALVES = TYPE == Q6_K;                // sub-blocks have 16 weights
    static constexpr bool INTEGERS = WIDE && !HALVES;           // scale s is an integer; code * s is exact in float16
    static constexpr bool WHOLE = TYPE == INT4_128;             // blocks have the 128 weights of a unit
    static constexpr bool ZERO = TYPE == INT4 || WHOLE;         // blocks have a zero point z
    static constexpr bool MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr bool FOUR = MINIMUM || ZERO;               // scales of a block of 32 have four bytes
    static constexpr bool FP4 = TYPE == MXFP4;                  // codes are numbers of FP4
    static constexpr bool FIVE = TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K;
    static constexpr int BITS = TYPE == Q8_0 ? 8 : TYPE == Q6_K ? 6 : FIVE ? 5 : 4;
    static constexpr int OFFSET = TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q8_0 ? 128 : TYPE == Q6_K ? 32 : 0;
    static constexpr int VECTORS = BITS == 8 ? 2 : 1;
    static constexpr int HIGH = BITS == 5 ? 4 : BITS == 6 ? 8 : 1;  // bytes per lane with high bits
    static constexpr int LOW_BYTES = 512 * VECTORS, HIGH_BYTES = BITS == 5 || BITS == 6 ? 32 * HIGH : 0;
    static constexpr int UNITS = WIDE ? 2 : 1;
    static constexpr int ROW_SCALES = HALVES ? 18 : WHOLE || FP4 ? 4 : WIDE || FOUR ? 16 : 8;
    static constexpr int SCALE_BYTES = ROW_GROUP * ROW_SCALES;
    static constexpr int BYTES = UNITS * (LOW_BYTES + HIGH_BYTES) + SCALE_BYTES;
    static constexpr int SCALE = INTEGERS ? 16 : FOUR ? 4 : FP4 ? 1 : 2;  // bytes of scales that a lane loads
    static constexpr float FINE = INTEGERS ? 32768.0f : 1.0f;  // codes() returns codes divided by FINE

    Vec<W, 16> low[VECTORS];
    Vec<W, HIGH> high;
    Vec<W, SCALE> scale;
    Vec<W, 2> d;

    __host__ __device__ static constexpr int row_bytes(int K) {  // bytes of eight rows of K weights
        return (K + UNITS * UNIT - 1) / (UNITS * UNIT) * BYTES;
    }

    // low_at(), high_at() and scales_at() return byte offsets within eight rows of w: the offset of the low bits, high
    // bits or scales of unit `unit` (128 values along K).
    __device__ __forceinline__ static int low_at(int unit) { return unit / UNITS * BYTES + unit % UNITS * LOW_BYTES; }
    __device__ __forceinline__ static int high_at(int unit) {
        return unit / UNITS * BYTES + UNITS * LOW_BYTES + unit % UNITS * HIGH_BYTES;
    }
    __device__ __forceinline__ static int scales_at(int unit) {
        return unit / UNITS * BYTES + UNITS * (LOW_BYTES + HIGH_BYTES);
    }

    // Loads this lane's 32 weights of row g of a tile, from global or shared memory. lows, highs, scales: addresses of
    // the low bits, high bits and scales of unit `unit` in the tile.
    __device__ __forceinline__ void load(const W* lows, const W* highs, const W* scales, int unit, int g) {
        const int t = threadIdx.x % 4, lane = 4 * g + t, half = unit % 2;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) low[i] = read<16>(lows + 512 * i + lane * 16);
        if (HIGH_BYTES) high = read<HIGH>(highs + lane * HIGH);
        const int of_lane = INTEGERS || WHOLE ? 0 : HALVES ? 8 * half + 2 * t : SCALE * t;
        scale = read<SCALE>(scales + g * (HALVES ? 16 : ROW_SCALES) + of_lane);
        if (HALVES) d = read<2>(scales + 128 + g * 2);
    }

    // Loads this lane's 32 weights of row `row` and of unit `unit` (128 values) along K. w: all rows with this GGUF
    // type.
    __device__ __forceinline__ void load(const W* w, int K, int row, int unit) {
        const W* row_group = w + (long long)(row / ROW_GROUP) * row_bytes(K);
        load(row_group + low_at(unit), row_group + high_at(unit), row_group + scales_at(unit), unit, row % ROW_GROUP);
    }

    // Scales that lane 4 g + t computes for a unit of 128 values: the scales of chunk t (32 values) of row g. by: with
    // INTEGERS, s * 2^9 and s * 2^5 as float16; with ZERO, z in both halves. first: factor d of the chunk; for Q6_K,
    // `first` and `second` are d * s of the chunk's two halves.
    struct Own {
        float first, second;
        unsigned by;
    };

    __device__ __forceinline__ Own own(int unit) const {
        if constexpr (HALVES) {
            const float of_block = floats_of((unsigned)d.raw).x;
            const int two = (int)scale.raw;
            return {of_block * (float)(signed char)(two & 255), of_block * (float)(signed char)(two >> 8 & 255), 0u};
        } else if constexpr (INTEGERS) {
            const unsigned s = own_byte(unit % 2 ? scale.raw.z : scale.raw.y, 0x64646464u) & 0xff3fff3fu;  // 1024 + s
            const unsigned far = fma2_fp16(s, 0x50005000u, 0xf800f800u);  // 2^5 (1024 + s) - 2^15
            return {0.0f, 0.0f, fma2_fp16(far, 0x3c004c00u, 0x80008000u)};
        } else if constexpr (ZERO) {
            const unsigned both = (unsigned)scale.raw;
            return {__int_as_float((int)(both & ~255u)), 0.0f, (both & 255u) * 0x10001u};
        } else if constexpr (FP4) {
            return {power_of_two((unsigned)scale.raw), 0.0f, 0u};
        } else {
            return {floats_of((unsigned)scale.raw).x, 0.0f, 0u};
        }
    }

    // Factors for the sums of products in a GGUF tile. d: factor of the sums of codes() times x. minimum: factor of the
    // sums of `least` times chunk sums of x. least: m of chunk t of each unit as float16, in both halves of a word;
    // with INTEGERS, m * 2^-22 as a subnormal number.
    struct End {
        float d, minimum;
        unsigned least[UNITS];
    };

    __device__ __forceinline__ End end() const {
        if constexpr (INTEGERS) {
            const float2 of_block = floats_of(scale.raw.x);
            const unsigned low = own_byte(scale.raw.w);
            return {FINE * of_block.x, -134217728.0f * of_block.y,  // -2^27: 2^22 for `least` times 32 for split_sum()
                    {(own_byte(scale.raw.y) & 0xc000c0u) | (low << 2 & 0x3c003cu),
                     (own_byte(scale.raw.z) & 0xc000c0u) | (low >> 2 & 0x3c003cu)}};
        } else {
            return {0.0f, 32.0f, {__byte_perm((unsigned)scale.raw, 0u, 0x3232)}};
        }
    }

    // Returns Own::by of the lane that holds the scales of a chunk (32 values), with which codes() computes the chunk.
    __device__ __forceinline__ static unsigned by_of(const Own& own, int chunk) {
        return WHOLE ? own.by : INTEGERS || ZERO ? of_lane(own.by, chunk) : 0u;
    }

    // Computes the lane's codes of a chunk (32 values) minus OFFSET, or with ZERO minus z, as pairs of float16 in the
    // order of K; with FP4, f(code). With INTEGERS, codes are multiplied by s / FINE, which is exact. by: by_of() the
    // chunk.
    __device__ __forceinline__ void codes(int chunk, unsigned by, unsigned (&pairs)[4]) const {
        const unsigned offset = ZERO ? by : OFFSET * 0x10001u;  // as float16, NEAR is -1024 - offset, FAR -64 - offset
        const unsigned NEAR = 0xe400e400u + offset, FAR = 0xd400d400u + offset * 16;
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
        if constexpr (FP4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned rest = i < 3 ? first << (9 - 4 * i) : first >> 3;
                pairs[i] = (first << (12 - 4 * i) & 0x80008000u) | (rest & 0x0e000e00u);
                pairs[i] = fma2_fp16(pairs[i], 0x78007800u, 0x80008000u);  // times 2^15
            }
            return;
        }
        unsigned up = 0, down = 0;  // high bits of the codes in pairs 0 and 1 (up), 2 and 3 (down)
        constexpr unsigned ONES = BITS == 6 ? 0x300030u : 0x100010u;
        if constexpr (BITS == 5) up = (unsigned)high.raw << (4 - chunk), down = (unsigned)high.raw >> (4 + chunk);
        if constexpr (BITS == 6) {
            const unsigned bits = chunk < 2 ? high.raw.x : high.raw.y;
            up = bits << (4 - chunk % 2 * 2), down = bits >> (4 + chunk % 2 * 2);
        }
        pairs[0] = (first & 0xf000fu) | (up & ONES);
        pairs[1] = (first & 0xf000f0u) | (up & ONES << 4);
        pairs[2] = (second & 0xf000fu) | (down & ONES);
        pairs[3] = (second & 0xf000f0u) | (down & ONES << 4);
        // Read as float16, the bits of even pairs are codes * 2^-24, the bits of odd pairs codes * 2^-20. With
        // INTEGERS, even pairs are multiplied by s * 2^9 and odd pairs by s * 2^5.
        const unsigned near = INTEGERS ? twice<false>(by) : NEAR, far = INTEGERS ? twice<true>(by) : FAR;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (INTEGERS) pairs[i] = fma2_fp16(pairs[i], i % 2 ? far : near, 0x80008000u);
            else pairs[i] = add2_fp16(pairs[i] | (i % 2 ? 0x54005400u : 0x64006400u), i % 2 ? far : near);
        }
    }

    // Factors from which halves() computes the float16 weights of chunk t, each in both halves of a word. With
    // INTEGERS: of[0] = s, of[1] = -(64 s + n) with n = dmin m / d, of[2] = the rounding error of dmin m, of[3] = d.
    // With HALVES: d s and its rounding error, for the first half of the chunk, then for the second half. With ZERO: d,
    // exact unless d was a bfloat16 number below 2^-14, and z. For other types: d, m.
    struct Factors {
        unsigned of[4];
    };

    __device__ __forceinline__ Factors factors(int unit) const {
        if constexpr (HALVES) {
            const float of_block = floats_of((unsigned)d.raw).x;
            Factors found;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float by = of_block * (float)(signed char)((int)scale.raw >> 8 * half & 255);
                const unsigned high = pack2_fp16(by, by);
                const float more = by - floats_of(high).x;
                found.of[2 * half] = high, found.of[2 * half + 1] = pack2_fp16(more, more);
            }
            return found;
        } else if constexpr (INTEGERS) {
            // d s q - dmin m = d (s (64 + q) - near) + left. near: 64 s + dmin m / d, rounded; left: the remainder.
            const float2 of_block = floats_of(scale.raw.x);
            const unsigned both = unit % 2 ? scale.raw.z : scale.raw.y, at = 8 * (threadIdx.x % 4);
            const float s = (float)(both >> at & 63);
            const float least = of_block.y * (float)((both >> at >> 2 & 48) | (scale.raw.w >> at >> unit % 2 * 4 & 15));
            const float n = __fdividef(least, of_block.x);
            const float near = fmaf(64.0f, s, fminf(fmaxf(n, -2048.0f), 2048.0f));
            const unsigned rounded = pack2_fp16(near, near);
            const float left = fmaf(of_block.x, floats_of(rounded).x - 64.0f * s, -least);
            return {{pack2_fp16(s, s), rounded ^ 0x80008000u, pack2_fp16(left, left),
                     __byte_perm(scale.raw.x, 0u, 0x1010)}};
        } else if constexpr (ZERO || FP4) {
            const Own all = own(unit);
            return {{pack2_fp16(all.first, all.first), all.by, 0u, 0u}};
        } else {
            const unsigned halves = (unsigned)scale.raw;
            return {{__byte_perm(halves, 0u, 0x1010), __byte_perm(halves, 0u, 0x3232), 0u, 0u}};
        }
    }

    // Computes the lane's four pairs of weights of a chunk as float16. The pairs are 8 apart along K. Each weight is
    // rounded once. With HALVES and INTEGERS, `own` contains rounding errors; the correction by these errors is itself
    // only exact to 2^-12 of the correction.
    __device__ __forceinline__ void halves(int chunk, const Factors& own, unsigned (&pairs)[4]) const {
        constexpr int COUNT = INTEGERS ? 3 : HALVES ? 4 : MINIMUM || ZERO ? 2 : 1;
        unsigned by[4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) by[i] = of_lane(own.of[i], chunk);
        if constexpr (INTEGERS) {
            const unsigned first = word(low[0], chunk);
            const unsigned low_bits[4] = {first << 4, first, first >> 4, first >> 8};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned q = (low_bits[i] & 0xf000f0u) | 0x54005400u;  // 64 + q
                if constexpr (FIVE) {
                    const int right = chunk + 4 * i - 8;
                    q |= (right < 0 ? (unsigned)high.raw << -right : (unsigned)high.raw >> right) & 0x1000100u;
                }
                pairs[i] = fma2_fp16(fma2_fp16(q, by[0], by[1]), own.of[3], by[2]);
            }
        } else {
            codes(chunk, ZERO ? by[1] : 0u, pairs);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = HALVES ? i / 2 * 2 : 0;
                unsigned more = MINIMUM ? by[1] : 0x80008000u;
                if (HALVES) more = fma2_fp16(pairs[i], by[half + 1], 0u);
                pairs[i] = fma2_fp16(pairs[i], by[half], more);
            }
        }
    }

    // Computes the lane's four pairs of weights of a chunk (32 values along K) as floats.
    __device__ __forceinline__ void weights(int unit, int chunk, float2 (&v)[4]) const {
        const Own own = this->own(unit);
        const End end = this->end();
        const float first = of_lane(own.first, chunk), second = of_lane(own.second, chunk);
        const unsigned least = of_lane(end.least[unit % UNITS], chunk);
        unsigned pairs[4];
        codes(chunk, by_of(own, chunk), pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 q = floats_of(pairs[i]);
            const float by = INTEGERS ? end.d : HALVES && i > 1 ? second : first;
            const float more = MINIMUM ? end.minimum * 0.03125f * floats_of(least).x : 0.0f;
            v[i] = {fmaf(by, q.x, more), fmaf(by, q.y, more)};
        }
    }

   private:
    // Returns the same 16 bits in both halves of the result: as lower byte, byte t of `word`, where t is the lane
    // number modulo 4; as upper byte, the lowest byte of `above`.
    __device__ __forceinline__ static unsigned own_byte(unsigned word, unsigned above = 0u) {
        return __byte_perm(word, above, 0x4040 + threadIdx.x % 4 * 0x101);
    }

    template <int COUNT>
    __device__ __forceinline__ static Vec<W, COUNT> read(const W* from) {
        return {*reinterpret_cast<const typename Vec<W, COUNT>::Raw*>(from)};
    }

    __device__ __forceinline__ static unsigned word(const Vec<W, 16>& v, int i) {
        return i == 0 ? v.raw.x : i == 1 ? v.raw.y : i == 2 ? v.raw.z : v.raw.w;
    }
};

}  // namespace gguf
