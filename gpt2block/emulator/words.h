// Arithmetic on the halves and bytes of a 32-bit word. Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

// Applies op to corresponding parts of the words, and returns a word of the results' low bits.
template <typename Part, typename Op, typename... Words>
unsigned by_part(Op op, Words... words) {
    std::uint64_t result = 0;
    for (int at = 0; at < 32; at += 8 * int(sizeof(Part))) {
        const std::int64_t part = op(std::int64_t((Part)((unsigned)words >> at))...);
        result |= (std::uint64_t)(std::make_unsigned_t<Part>)part << at;
    }
    return (unsigned)result;
}

template <typename Part>
std::int64_t saturated(std::int64_t x) {
    constexpr std::int64_t values = std::int64_t(1) << 8 * sizeof(Part);
    constexpr std::int64_t least = std::is_signed_v<Part> ? -values / 2 : 0, largest = least + values - 1;
    return min(max(x, least), largest);
}

inline std::int64_t distance(std::int64_t a, std::int64_t b) { return a < b ? b - a : a - b; }

// Returns c plus the dot product of all parts of a with as many parts of b, which begin at byte `first`.
template <typename A, typename B, typename T>
T dot(T a, T b, T c, int first = 0) {
    std::int64_t sum = c;
    for (int i = 0; i < 4 / int(sizeof(A)); ++i) {
        const A left = (A)((unsigned)a >> 8 * int(sizeof(A)) * i);
        sum += std::int64_t(left) * (B)((unsigned)b >> 8 * (first + i));
    }
    return (T)sum;
}

}  // namespace cuda_on_cpu

// Defines name2 for halves and name4 for bytes; `result` is an expression of the parts a and b.
#define FOR_PARTS(function, type, result)                                                           \
    inline unsigned function(unsigned x, unsigned y) {                                              \
        typedef type Part;                                                                          \
        return cuda_on_cpu::by_part<Part>([](std::int64_t a, std::int64_t b) { return result; }, x, y); \
    }
#define HALVES_AND_BYTES(name, sign, result)   \
    FOR_PARTS(name##2, sign short, result)     \
    FOR_PARTS(name##4, sign char, result)
HALVES_AND_BYTES(__vadd, unsigned, a + b)
HALVES_AND_BYTES(__vaddss, signed, cuda_on_cpu::saturated<Part>(a + b))
HALVES_AND_BYTES(__vaddus, unsigned, cuda_on_cpu::saturated<Part>(a + b))
HALVES_AND_BYTES(__vsub, unsigned, a - b)
HALVES_AND_BYTES(__vsubss, signed, cuda_on_cpu::saturated<Part>(a - b))
HALVES_AND_BYTES(__vsubus, unsigned, cuda_on_cpu::saturated<Part>(a - b))
HALVES_AND_BYTES(__vhaddu, unsigned, (a + b) / 2)
HALVES_AND_BYTES(__vavgu, unsigned, (a + b + 1) / 2)
HALVES_AND_BYTES(__vabsdiffs, signed, cuda_on_cpu::distance(a, b))
HALVES_AND_BYTES(__vabsdiffu, unsigned, cuda_on_cpu::distance(a, b))
HALVES_AND_BYTES(__vmaxs, signed, max(a, b))
HALVES_AND_BYTES(__vmaxu, unsigned, max(a, b))
HALVES_AND_BYTES(__vmins, signed, min(a, b))
HALVES_AND_BYTES(__vminu, unsigned, min(a, b))
HALVES_AND_BYTES(__vcmpeq, unsigned, -std::int64_t(a == b))  // sets all bits of a part, or none
HALVES_AND_BYTES(__vcmpne, unsigned, -std::int64_t(a != b))
HALVES_AND_BYTES(__vcmpges, signed, -std::int64_t(a >= b))
HALVES_AND_BYTES(__vcmpgeu, unsigned, -std::int64_t(a >= b))
HALVES_AND_BYTES(__vcmpgts, signed, -std::int64_t(a > b))
HALVES_AND_BYTES(__vcmpgtu, unsigned, -std::int64_t(a > b))
HALVES_AND_BYTES(__vcmples, signed, -std::int64_t(a <= b))
HALVES_AND_BYTES(__vcmpleu, unsigned, -std::int64_t(a <= b))
HALVES_AND_BYTES(__vcmplts, signed, -std::int64_t(a < b))
HALVES_AND_BYTES(__vcmpltu, unsigned, -std::int64_t(a < b))
#undef HALVES_AND_BYTES
#undef FOR_PARTS

#define HALVES_AND_BYTES(parts)                                                                                  \
    inline unsigned __vneg##parts(unsigned x) { return __vsub##parts(0, x); }                                    \
    inline unsigned __vnegss##parts(unsigned x) { return __vsubss##parts(0, x); }                                \
    inline unsigned __vabs##parts(unsigned x) { return __vabsdiffs##parts(x, 0); }                               \
    inline unsigned __vabsss##parts(unsigned x) { return __vmaxs##parts(x, __vnegss##parts(x)); }                \
    inline unsigned __vsads##parts(unsigned x, unsigned y) { return __vsadu##parts(__vabsdiffs##parts(x, y), 0); }
inline unsigned __vsadu2(unsigned x, unsigned y) {
    const unsigned d = __vabsdiffu2(x, y);
    return (d & 0xffff) + (d >> 16);
}
inline unsigned __vsadu4(unsigned x, unsigned y) {
    const unsigned d = __vabsdiffu4(x, y);
    return (d & 0xff) + (d >> 8 & 0xff) + (d >> 16 & 0xff) + (d >> 24);
}
HALVES_AND_BYTES(2)
HALVES_AND_BYTES(4)
#undef HALVES_AND_BYTES

// Maximum and minimum of three numbers, instructions since compute capability 9.0, for 32-bit numbers and two halves.
#define OF_THREE(function, word, type, result)                                                                 \
    inline word function(word x, word y, word z) {                                                             \
        typedef type Part;                                                                                     \
        const auto op = [](std::int64_t a, std::int64_t b, std::int64_t c) -> std::int64_t { return result; }; \
        return (word)cuda_on_cpu::by_part<Part>(op, x, y, z);                                                  \
    }
#define EXTREME(name, result)                                           \
    OF_THREE(name##_s32, int, int, result)                              \
    OF_THREE(name##_u32, unsigned, unsigned, result)                    \
    OF_THREE(name##_s16x2, unsigned, short, result)                     \
    OF_THREE(name##_u16x2, unsigned, unsigned short, result)            \
    OF_THREE(name##_s32_relu, int, int, max(result, 0))                 \
    OF_THREE(name##_s16x2_relu, unsigned, short, max(result, 0))
EXTREME(__viaddmax, max(Part(a + b), c))
EXTREME(__viaddmin, min(Part(a + b), c))
EXTREME(__vimax3, max(max(a, b), c))
EXTREME(__vimin3, min(min(a, b), c))
#undef EXTREME
#undef OF_THREE
inline int __vimax_s32_relu(int x, int y) { return __vimax3_s32(x, y, 0); }
inline int __vimin_s32_relu(int x, int y) { return __vimin3_s32_relu(x, y, y); }
inline unsigned __vimax_s16x2_relu(unsigned x, unsigned y) { return __vimax3_s16x2(x, y, 0); }
inline unsigned __vimin_s16x2_relu(unsigned x, unsigned y) { return __vimin3_s16x2_relu(x, y, y); }

// Dot products plus c: of four bytes with four bytes (__dp4a), and of two halves with the low or high bytes (__dp2a).
#define DOT(word, half, byte, halves, bytes)                                                                          \
    inline word __dp4a(word a, word b, word c) { return cuda_on_cpu::dot<byte, byte>(a, b, c); }                      \
    inline word __dp2a_lo(word a, word b, word c) { return cuda_on_cpu::dot<half, byte>(a, b, c); }                   \
    inline word __dp2a_hi(word a, word b, word c) { return cuda_on_cpu::dot<half, byte>(a, b, c, 2); }                \
    inline word __dp4a(bytes a, bytes b, word c) {                                                                    \
        return __dp4a(cuda_on_cpu::bits<word>(a), cuda_on_cpu::bits<word>(b), c);                                     \
    }                                                                                                                 \
    inline word __dp2a_lo(halves a, bytes b, word c) {                                                                \
        return __dp2a_lo(cuda_on_cpu::bits<word>(a), cuda_on_cpu::bits<word>(b), c);                                  \
    }                                                                                                                 \
    inline word __dp2a_hi(halves a, bytes b, word c) {                                                                \
        return __dp2a_hi(cuda_on_cpu::bits<word>(a), cuda_on_cpu::bits<word>(b), c);                                  \
    }
DOT(int, short, signed char, short2, char4)
DOT(unsigned, unsigned short, unsigned char, ushort2, uchar4)
#undef DOT
