// Floating-point numbers of PTX as bit patterns. Every result is rounded once, as on a GPU. A NaN that an operation
// makes is the canonical one; operations with f64 return the NaN of the host, whose rules are the same.
//
// Operations with f32, f16 and bf16 are computed in double, rounded to odd: if a result is inexact, its last bit is set.
// Rounding it again, to at most 51 bits and in any direction, then equals rounding the exact result.
#pragma once
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace numbers {

enum class Round : uint8_t { nearest, zero, down, up, away };  // .rn .rz .rm .rp .rna

struct Way {  // how a result is made from the exact one
    Round round = Round::nearest;
    bool ftz = false;       // subnormal operands and results become zeros
    bool sat = false;       // [0, 1]; NaN becomes 0
    bool relu = false;      // negative results become 0
    bool finite = false;    // the largest number instead of infinity
    bool integral = false;  // rounded to an integer
};

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A format with E bits of exponent and M of fraction.
template <unsigned E, unsigned M>
struct Format {
    static constexpr unsigned BITS = 1 + E + M, EXPONENT = E, FRACTION = M;
    static constexpr int BIAS = (1 << (E - 1)) - 1, LEAST = 1 - BIAS;  // LEAST: exponent of the smallest normal number
    static constexpr uint64_t SIGN = 1ull << (E + M), MAGNITUDE = SIGN - 1, NAN_ = MAGNITUDE;
    static constexpr bool HAS_INFINITY = E != 4;
    static constexpr uint64_t INFINITY_ = HAS_INFINITY ? MAGNITUDE >> M << M : MAGNITUDE, LARGEST = INFINITY_ - 1;
    static constexpr uint64_t NORMAL = 1ull << M;  // the smallest normal number
    static constexpr uint64_t ONE = (uint64_t)BIAS << M;

    static bool is_nan(uint64_t x) { return (x & MAGNITUDE) > (HAS_INFINITY ? INFINITY_ : LARGEST); }
    static uint64_t flushed(uint64_t x) { return (x & MAGNITUDE) < NORMAL ? x & SIGN : x; }
};
using F64 = Format<11, 52>;
using F32 = Format<8, 23>;
using F16 = Format<5, 10>;
using BF16 = Format<8, 7>;
using TF32 = Format<8, 10>;  // in the upper 19 bits of 32
using E4M3 = Format<4, 3>;
using E5M2 = Format<5, 2>;

// Returns the value of a number, which is exact.
template <class F>
inline double value(uint64_t x, bool ftz = false) {
    if (ftz) x = F::flushed(x);
    if constexpr (F::BITS == 64) {
        return bits<double>(x);
    } else {
        const uint32_t moved = (uint32_t)(x & F::MAGNITUDE) << (23 - F::FRACTION);
        const uint32_t sign = (uint32_t)(x & F::SIGN) << (32 - F::BITS);
        if (F::EXPONENT == 8) return bits<float>(moved | sign);
        const float size = bits<float>(moved) * bits<float>((uint32_t)(254 - F::BIAS) << 23);  // 2^(127 - BIAS)
        const bool special = (x & F::MAGNITUDE) >= F::INFINITY_;
        return bits<float>((special ? moved | 0x7f800000u : bits<uint32_t>(size)) | sign);
    }
}

// Rounds a number, which is exact or rounded to odd.
template <class F>
inline uint64_t narrow(double x, Way way = {}) {
    static_assert(F::FRACTION <= 49);
    const uint64_t own = bits<uint64_t>(x), magnitude = own & F64::MAGNITUDE;
    const bool negative = own >> 63;
    if (magnitude > F64::INFINITY_) return F::NAN_;
    if (way.relu && negative) return 0;
    const int exponent = magnitude < F64::NORMAL ? F64::LEAST : (int)(magnitude >> 52) - F64::BIAS;
    const uint64_t significand = (magnitude & (F64::NORMAL - 1)) | (magnitude < F64::NORMAL ? 0 : F64::NORMAL);
    const int above = exponent - F::LEAST, dropped = 52 - (int)F::FRACTION + (above < 0 ? -above : 0);
    const int shift = dropped > 63 ? 63 : dropped;
    const uint64_t rest = significand & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    uint64_t whole = significand >> shift;
    switch (way.round) {
        case Round::nearest: whole += rest > half || (rest == half && (whole & 1)); break;
        case Round::zero: break;
        case Round::down: whole += negative && rest; break;
        case Round::up: whole += !negative && rest; break;
        case Round::away: whole += rest >= half; break;
    }
    uint64_t result = (above < 0 ? 0 : (uint64_t)above << F::FRACTION) + whole;
    if (result > F::LARGEST) {
        const bool inwards = way.round == Round::zero || way.round == (negative ? Round::up : Round::down);
        result = way.finite || (inwards && magnitude != F64::INFINITY_) ? F::LARGEST : F::INFINITY_;
    }
    return result | (negative ? F::SIGN : 0);
}

// Rounds a result, which is exact or rounded to odd, and changes it in the way of an instruction.
template <class F>
inline uint64_t finish(double x, Way way) {
    if (way.sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if constexpr (F::BITS == 64) return bits<uint64_t>(x);
    if constexpr (F::BITS != 64) {
        const uint64_t result = narrow<F>(x, way);
        return way.ftz ? F::flushed(result) : result;
    }
}

inline uint64_t finish_f32(float x, Way way) {  // of a result that is rounded
    if (way.sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
    const uint32_t result = x != x ? (uint32_t)F32::NAN_ : bits<uint32_t>(x);
    return way.ftz ? F32::flushed(result) : result;
}

// Rounds near + missing to odd, where `missing` is what rounding to `near` has lost, or has its sign.
inline double odd(double near, double missing) {
    if (missing == 0 || !std::isfinite(near)) return near;
    const bool beyond = std::signbit(missing) != std::signbit(near);  // the exact number is nearer to 0
    return bits<double>((bits<uint64_t>(near) - beyond) | 1);
}

inline double odd_sum(double a, double b, Round round = Round::nearest) {
    const double sum = a + b, part = sum - a;
    if (sum == 0) return round == Round::down && (std::signbit(a) || std::signbit(b)) ? -0.0 : sum;
    return odd(sum, (a - (sum - part)) + (b - part));
}

inline double odd_quotient(double a, double b) {
    const double near = a / b;
    if (!std::isfinite(near) || !std::isfinite(b)) return near;
    const double rest = std::fma(-near, b, a);
    return odd(near, std::signbit(b) ? -rest : rest);
}

inline double odd_root(double a) {
    const double near = std::sqrt(a);
    return near > 0 && std::isfinite(near) ? odd(near, std::fma(-near, near, a)) : near;
}

// Computes with double in a direction of rounding.
template <class Compute>
inline uint64_t directed(Round round, Compute compute) {
    if (round == Round::nearest) return bits<uint64_t>(compute());
    const int before = std::fegetround();
    std::fesetround(round == Round::zero ? FE_TOWARDZERO : round == Round::down ? FE_DOWNWARD : FE_UPWARD);
    volatile const double result = compute();
    std::fesetround(before);
    return bits<uint64_t>((double)result);
}

// Operations: run<F>(a, b, c, way). Those with fewer operands ignore the others.
#define OPERATION(NAME, OF_DOUBLE, OF_FLOAT, ODD)                                                             \
    struct NAME {                                                                                             \
        template <class F>                                                                                    \
        static uint64_t run(uint64_t x, uint64_t y, uint64_t z, Way way) {                                    \
            if constexpr (F::BITS == 64) {                                                                    \
                volatile const double a = value<F>(x), b = value<F>(y), c = value<F>(z);                      \
                (void)a, (void)b, (void)c;                                                                    \
                return directed(way.round, [&] { return OF_DOUBLE; });                                        \
            }                                                                                                 \
            if (F::BITS == 32 && way.round == Round::nearest) {                                               \
                if (way.ftz) x = F::flushed(x), y = F::flushed(y), z = F::flushed(z);                         \
                const float a = bits<float>((uint32_t)x), b = bits<float>((uint32_t)y);                       \
                [[maybe_unused]] const float c = bits<float>((uint32_t)z);                                    \
                (void)a, (void)b;                                                                             \
                return finish_f32(OF_FLOAT, way);                                                             \
            }                                                                                                 \
            const double a = value<F>(x, way.ftz), b = value<F>(y, way.ftz), c = value<F>(z, way.ftz);        \
            (void)a, (void)b, (void)c;                                                                        \
            return finish<F>(ODD, way);                                                                       \
        }                                                                                                     \
    };
OPERATION(Add, a + b, a + b, odd_sum(a, b, way.round))
OPERATION(Sub, a - b, a - b, odd_sum(a, -b, way.round))
OPERATION(Mul, a * b, a * b, a * b)
OPERATION(Fma, std::fma(a, b, c), std::fma(a, b, c), odd_sum(a * b, c, way.round))
OPERATION(Div, a / b, a / b, odd_quotient(a, b))
OPERATION(Rcp, 1 / a, 1 / a, odd_quotient(1, a))
OPERATION(Sqrt, std::sqrt(a), std::sqrt(a), odd_root(a))
#undef OPERATION

// Approximate instructions of a GPU return the number nearest to the exact result here.
#define APPROXIMATE(NAME, RESULT)                                                       \
    struct NAME {                                                                       \
        template <class F>                                                              \
        static uint64_t run(uint64_t x, uint64_t y, uint64_t, Way way) {                \
            const double a = value<F>(x, way.ftz), b = value<F>(y, way.ftz);            \
            (void)b;                                                                    \
            const uint64_t result = finish<F>(RESULT, way);                             \
            return F::BITS == 64 && way.ftz ? F::flushed(result) : result;              \
        }                                                                               \
    };
APPROXIMATE(Ex2, std::exp2(a))
APPROXIMATE(Lg2, std::log2(a))
APPROXIMATE(Sin, std::sin(a))
APPROXIMATE(Cos, std::cos(a))
APPROXIMATE(Tanh, std::tanh(a))
APPROXIMATE(Rsqrt, 1 / std::sqrt(a))
APPROXIMATE(RcpApprox, 1 / a)
APPROXIMATE(SqrtApprox, std::sqrt(a))
APPROXIMATE(DivFull, a / b)
// div.approx does not divide by more than 2^126.
APPROXIMATE(DivApprox, std::fabs(b) > 0x1p126 && std::isfinite(b) ? a * 0.0 * (std::signbit(b) ? -1.0 : 1.0) : a / b)
#undef APPROXIMATE

// Returns the smaller or larger number; -0 is smaller than +0. One NaN is ignored unless `nan`.
template <class F>
inline uint64_t extreme(uint64_t x, uint64_t y, bool larger, bool nan, bool ftz) {
    if (ftz) x = F::flushed(x), y = F::flushed(y);
    const bool no_x = F::is_nan(x), no_y = F::is_nan(y);
    const uint64_t key_x = x & F::SIGN ? ~x & (F::SIGN | F::MAGNITUDE) : x | F::SIGN;
    const uint64_t key_y = y & F::SIGN ? ~y & (F::SIGN | F::MAGNITUDE) : y | F::SIGN;
    const uint64_t found = (key_x > key_y) == larger ? x : y;
    const uint64_t result = no_x ? y : no_y ? x : found;
    return (nan && (no_x || no_y)) || (no_x && no_y) ? F::NAN_ : result;
}

// Returns a number as an integer of `width` bits. Numbers out of range become the nearest integer in range.
inline uint64_t to_integer(double x, Round round, unsigned width, bool is_signed, bool from_f64) {
    if (x != x) return width == 64 || from_f64 ? 1ull << (width - 1) : 0;
    const double whole = round == Round::nearest ? std::nearbyint(x)
                         : round == Round::zero  ? std::trunc(x)
                         : round == Round::down  ? std::floor(x)
                                                 : std::ceil(x);
    const double limit = bits<double>((uint64_t)(1023 + width - is_signed) << 52), lowest = is_signed ? -limit : 0;
    const uint64_t most = width == 64 && !is_signed ? ~0ull : (1ull << (width - is_signed)) - 1;
    if (whole >= limit) return most;
    if (whole < lowest) return is_signed ? ~most : 0;
    return is_signed ? (uint64_t)(int64_t)whole : (uint64_t)whole;
}

// x: sign- or zero-extended to 64 bits.
template <class F>
inline uint64_t from_integer(uint64_t x, bool is_signed, Way way) {
    if constexpr (F::BITS == 64) {
        volatile const uint64_t given = x;
        return directed(way.round, [&] { return is_signed ? (double)(int64_t)given : (double)given; });
    }
    const double high = is_signed ? (double)((int64_t)x >> 32) : (double)(x >> 32);
    const double sum = odd_sum(high * 0x1p32, (double)(uint32_t)x);
    return finish<F>(sum, way);
}

// Converts between formats. Only numbers of f32 are flushed.
template <class To, class From>
inline uint64_t convert(uint64_t from, Way way) {
    double x = value<From>(from, way.ftz && From::BITS == 32);
    if (way.integral) {
        x = way.round == Round::nearest ? std::nearbyint(x)
            : way.round == Round::zero  ? std::trunc(x)
            : way.round == Round::down  ? std::floor(x)
                                        : std::ceil(x);
    }
    way.ftz &= To::BITS == 32;
    return finish<To>(x, way);
}

// Returns whether a comparison holds: 'l'ess, 'e'qual, 'g'reater, or 'u'nordered, as a set of bits 1, 2, 4, 8.
template <class F>
inline unsigned relation(uint64_t x, uint64_t y, bool ftz) {
    const double a = value<F>(x, ftz), b = value<F>(y, ftz);
    return a < b ? 1 : a == b ? 2 : a > b ? 4 : 8;
}

}  // namespace numbers
