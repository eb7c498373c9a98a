// Floating-point numbers of PTX as bit patterns. Every result is rounded once, as on a GPU. A NaN that an operation
// makes is the canonical one; operations with f64 return the NaN of the host, whose rules are the same.
//
// The host computes with f32 and f64 in the instruction's direction of rounding. Operations with shorter formats are
// computed in double, rounded to odd: if a result is inexact, its last bit is set. Rounding it again, to at most 51
// bits and in any direction, then equals rounding the exact result.
#pragma once
#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace numbers {

using std::bit_cast;

enum class Round : uint8_t { nearest, zero, down, up, away };  // .rn .rz .rm .rp .rna

struct Way {  // how a result is made from the exact one
    Round round = Round::nearest;
    bool ftz = false;       // subnormal operands and results become zeros
    bool sat = false;       // [0, 1]; NaN becomes 0
    bool relu = false;      // negative results become 0
    bool finite = false;    // the largest number instead of infinity
    bool integral = false;  // rounded to an integer
};

// Lets the host round in a direction until the end of a scope.
class Rounding {
    int before = -1;

public:
    explicit Rounding(Round round) {
        if (round == Round::nearest || round == Round::away) return;
        before = std::fegetround();
        std::fesetround(round == Round::zero ? FE_TOWARDZERO : round == Round::down ? FE_DOWNWARD : FE_UPWARD);
    }
    ~Rounding() {
        if (before >= 0) std::fesetround(before);
    }
};

// A format with E bits of exponent and M of fraction.
template <unsigned E, unsigned M>
struct Format {
    static constexpr unsigned BITS = 1 + E + M, EXPONENT = E, FRACTION = M;
    static constexpr int BIAS = (1 << (E - 1)) - 1, MIN_EXPONENT = 1 - BIAS;  // MIN_EXPONENT: exponent of the smallest normal number
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
        return bit_cast<double>(x);
    } else {
        const uint32_t moved = (uint32_t)(x & F::MAGNITUDE) << (23 - F::FRACTION);
        const uint32_t sign = (uint32_t)(x & F::SIGN) << (32 - F::BITS);
        if (F::EXPONENT == 8) return bit_cast<float>(moved | sign);
        const float size = bit_cast<float>(moved) * bit_cast<float>((uint32_t)(254 - F::BIAS) << 23);  // 2^(127 - BIAS)
        const bool special = (x & F::MAGNITUDE) >= F::INFINITY_;
        return bit_cast<float>((special ? moved | 0x7f800000u : bit_cast<uint32_t>(size)) | sign);
    }
}

// Rounds a number, which is exact or rounded to odd.
template <class F>
inline uint64_t narrow(double x, Way way = {}) {
    const uint64_t own = bit_cast<uint64_t>(x), magnitude = own & F64::MAGNITUDE;
    const bool negative = own >> 63, normal = magnitude >= F64::NORMAL;
    if (magnitude > F64::INFINITY_) return F::NAN_;
    if (way.relu && negative) return 0;
    const int exponent = normal ? (int)(magnitude >> 52) - F64::BIAS : F64::MIN_EXPONENT, above = exponent - F::MIN_EXPONENT;
    const uint64_t significand = (magnitude & (F64::NORMAL - 1)) | (normal ? F64::NORMAL : 0);
    const int shift = std::min(52 - (int)F::FRACTION - std::min(above, 0), 63);
    const uint64_t rest = significand & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    uint64_t whole = significand >> shift;
    const bool outwards = way.round == (negative ? Round::down : Round::up);
    if (way.round == Round::nearest) whole += rest > half || (rest == half && (whole & 1));
    else whole += way.round == Round::away ? rest >= half : outwards && rest;
    uint64_t result = (above < 0 ? 0 : (uint64_t)above << F::FRACTION) + whole;
    if (result > F::LARGEST) {
        const bool to_infinity = outwards || way.round == Round::nearest || way.round == Round::away;
        const bool infinite = to_infinity || magnitude == F64::INFINITY_;
        result = infinite && !way.finite ? F::INFINITY_ : F::LARGEST;
    }
    return result | (negative ? F::SIGN : 0);
}

// A double that is rounded to odd, to compute with numbers of formats that the host does not have.
struct Odd {
    double x;

    friend Odd operator+(Odd a, Odd b) {
        const double sum = a.x + b.x, part = sum - a.x, missing = (a.x - (sum - part)) + (b.x - part);
        if (missing == 0 || !std::isfinite(sum)) return {sum};
        const bool beyond = std::signbit(missing) != std::signbit(sum);  // the exact number is nearer to 0
        return {bit_cast<double>((bit_cast<uint64_t>(sum) - beyond) | 1)};
    }
    friend Odd operator-(Odd a, Odd b) { return a + Odd{-b.x}; }
    friend Odd operator*(Odd a, Odd b) { return {a.x * b.x}; }  // exact, as numbers with 11 bits are multiplied
    friend Odd fma(Odd a, Odd b, Odd c) { return a * b + c; }
};

// The type with which the host computes, and a result in it, which is changed in the way of an instruction.
template <class F>
using Host = std::conditional_t<F::BITS == 64, double, std::conditional_t<F::BITS == 32, float, Odd>>;

template <class F>
inline Host<F> host(uint64_t x) {
    if constexpr (F::BITS == 64) return bit_cast<double>(x);
    else if constexpr (F::BITS == 32) return bit_cast<float>((uint32_t)x);
    else return {value<F>(x)};
}

template <class F, class T>
inline uint64_t finish(T x, Way way) {
    if constexpr (std::is_same_v<T, Odd>) return finish<F>(x.x, way);
    else {
        if (way.sat) x = x > 0 ? (x < 1 ? x : 1) : 0;
        uint64_t result;
        if constexpr (sizeof(T) * 8 != F::BITS) result = narrow<F>(x, way);
        else if constexpr (F::BITS == 64) result = bit_cast<uint64_t>(x);
        else result = x != x ? (uint32_t)F::NAN_ : bit_cast<uint32_t>(x);
        return way.ftz ? F::flushed(result) : result;
    }
}

// Returns the smaller or larger number; -0 is smaller than +0. One NaN is ignored unless `nan`.
template <class F>
inline uint64_t extreme(uint64_t x, uint64_t y, bool larger, bool nan) {
    const auto key = [](uint64_t a) { return a & F::SIGN ? ~a & (F::SIGN | F::MAGNITUDE) : a | F::SIGN; };
    const bool no_x = F::is_nan(x), no_y = F::is_nan(y);
    if ((no_x && no_y) || (nan && (no_x || no_y))) return F::NAN_;
    return no_x || (!no_y && (key(x) > key(y)) != larger) ? y : x;
}

// Returns a number as an integer of `width` bits, rounded in the host's direction. Numbers out of range become the
// nearest integer in range.
inline uint64_t to_integer(double x, unsigned width, bool is_signed, bool from_f64) {
    if (x != x) return width == 64 || from_f64 ? 1ull << (width - 1) : 0;
    const double whole = std::nearbyint(x);
    const double limit = bit_cast<double>((uint64_t)(1023 + width - is_signed) << 52);
    const uint64_t most = ~0ull >> (64 - width + is_signed);
    if (whole >= limit) return most;
    if (whole < (is_signed ? -limit : 0)) return is_signed ? ~most : 0;
    return is_signed ? (uint64_t)(int64_t)whole : (uint64_t)whole;
}

// Returns an integer, whose sign is extended to 64 bits, rounded to odd.
inline double odd_integer(uint64_t x, bool is_signed) {
    const bool negative = is_signed && (int64_t)x < 0;
    const uint64_t magnitude = negative ? 0 - x : x, lost = magnitude >> 53 ? magnitude & 2047 : 0;
    const double size = (double)(magnitude - lost | (lost ? 2048 : 0));
    return negative ? -size : size;
}

// Returns how a comparison ends: less, equal, greater or unordered, as a bit 1, 2, 4 or 8.
template <class F>
inline unsigned relation(uint64_t x, uint64_t y, bool ftz) {
    const double a = value<F>(x, ftz), b = value<F>(y, ftz);
    return a < b ? 1 : a == b ? 2 : a > b ? 4 : 8;
}

}  // namespace numbers
