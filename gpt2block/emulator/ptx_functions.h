// Approximate functions and conversions of PTX. Included by ptx.h.
#pragma once

namespace ptx_on_cpu {

// Returns the exact result with an error of at most `error`, but of almost this size. A hash of the argument selects the
// sign of the error. Therefore a kernel that needs a smaller error than PTX guarantees gives wrong results.
template <typename F>
F off_by(double error, double exact, double argument) {
    if (argument == 0.0 || !std::isfinite(argument) || exact == 0.0 || !std::isfinite(exact)) return nearest<F>(exact);
    const double signed_error = bits<std::uint64_t>(argument) * 0x9e3779b97f4a7c15u >> 63 ? error : -error;
    for (double part = 1.0; part > 0.0; part -= 0.25) {
        const F result = nearest<F>(exact + part * signed_error);
        if (std::fabs((double)result - exact) <= error) return result;
    }
    return nearest<F>(exact);
}

inline double ulp(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 23); }

template <typename F>
constexpr double by_type(double f32, double f16, double bf16) {
    return std::is_same_v<F, float> ? f32 : std::is_same_v<F, F16> ? f16 : bf16;
}

constexpr double ROOT_2 = 1.41421356, TENTH = 1.07177346;  // 2^0.5 and 2^0.1

// The maximum errors are those of the PTX ISA 9.1, sections 9.7.3 "Floating Point Instructions" and 9.7.4 "Half Precision
// Floating Point Instructions", in the notes on each instruction.
#define APPROXIMATE(name, exact, error)                                    \
    template <typename T>                                                  \
    T name##_approx(T a) {                                                 \
        return lanes([](auto argument) {                                   \
            typedef decltype(argument) F;                                  \
            [[maybe_unused]] const double x = argument, y = exact;         \
            if constexpr (std::is_same_v<F, double>) return y;             \
            else return off_by<F>(error, y, argument);                     \
        }, a);                                                             \
    }
// f32: 2 ulp. f16: 2^-9.9, bf16: 2^-7, relative.
APPROXIMATE(ex2, std::exp2(x), by_type<F>(2.0 * ulp(y), 0x1p-10 * TENTH * y, 0x1p-7 * y))
// 2^-22: absolute for arguments between 0.5 and 2, otherwise relative.
APPROXIMATE(lg2, std::log2(x), 0x1p-22 * (x > 0.5 && x < 2.0 ? 1.0 : std::fabs(y)))
APPROXIMATE(rcp, 1.0 / x, ulp(y))                                       // 1 ulp
APPROXIMATE(rsqrt, 1.0 / std::sqrt(x), 0x1p-23 * TENTH * std::fabs(y))  // 2^-22.9, relative
APPROXIMATE(sqrt, std::sqrt(x), 0x1p-23 * y)                            // 2^-23, relative
// f32: 2^-11, relative. f16: 2^-10.987, bf16: 2^-8, absolute.
APPROXIMATE(unlimited_tanh, std::tanh(x), by_type<F>(0x1p-11 * std::fabs(y), 0x1p-11 * 1.009, 0x1p-8))
// 2^-20.5 up to 2 pi, 2^-14.7 up to 100 pi, absolute. PTX guarantees nothing for larger arguments.
#define OF_ANGLE (std::fabs(x) <= 6.2831853 ? 0x1p-21 * ROOT_2 : std::fabs(x) <= 314.15926 ? 0x1p-15 * 1.231 : 1.0)
APPROXIMATE(sin, std::sin(x), OF_ANGLE)
APPROXIMATE(cos, std::cos(x), OF_ANGLE)
#undef OF_ANGLE
#undef APPROXIMATE

template <typename T>
T tanh_approx(T a) {  // never exceeds 1
    return lanes([](auto v) {
        return std::fabs((double)v) > 1.0 ? nearest<decltype(v)>(std::copysign(1.0, (double)v)) : v;
    }, unlimited_tanh_approx(a));
}

inline float div_full(float a, float b) {  // 2 ulp
    const double exact = (double)a / b;
    return off_by<float>(2.0 * ulp(exact), exact, a == 0.0f ? 0.0 : a + 3.0 * b);
}
inline float div_approx(float a, float b) {  // 2 ulp; the quotient is 0 or NaN for |b| > 2^126
    return std::fabs(b) > 0x1p126f ? a * 0.0f : div_full(a, b);
}

// --- conversions

inline double integral(int mode, double x) {
    return mode == FE_TONEAREST ? std::nearbyint(x) : mode == FE_TOWARDZERO ? std::trunc(x)
         : mode == FE_DOWNWARD ? std::floor(x) : std::ceil(x);
}

template <typename D, typename S>
D convert(int mode, bool whole, S x) {  // whole: round a floating-point number to an integer of the same type
    if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
        return (D)x;
    } else if constexpr (std::is_integral_v<D>) {
        return cuda_on_cpu_to_integer<D>(integral(mode, (double)x));
    } else if constexpr (is_16<D>) {
        if constexpr (std::is_integral_v<S>) return nearest<D>(cuda_on_cpu::odd_number(x));
        else {
            D result = nearest<D>(whole ? integral(mode, (double)x) : (double)x);
            if (mode == FE_TOWARDZERO && std::fabs((double)result) > std::fabs((double)x)) --result.bits;
            return result;
        }
    } else if constexpr (is_16<S>) {
        return (D)(double)x;
    } else {
        return whole ? (D)integral(mode, (double)x) : cuda_on_cpu::rounded(mode, [](S v) { return (D)v; }, x);
    }
}

template <typename D, typename S>
D limited(S x) {  // converts an integer to the nearest number of D
    const __int128 low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max(), wide = x;
    return (D)(wide < low ? low : wide > high ? high : wide);
}

template <typename T>
T satfinite(T value) {  // replaces infinities by the largest numbers
    return lanes([](auto v) {
        const std::uint16_t infinity = std::is_same_v<decltype(v), F16> ? 0x7c00 : 0x7f80;
        if ((v.bits & 0x7fff) == infinity) --v.bits;
        return v;
    }, value);
}

inline std::uint32_t tf32(float x) {  // rounds to nearest, and ties away from zero
    const std::uint32_t own = bits<std::uint32_t>(x);
    return std::isfinite(x) ? (own + 0x1000u) & 0xffffe000u : own;
}

// An 8-bit format with M bits of fraction: e4m3 (M = 3), which has no infinity, or e5m2 (M = 2).
template <int M>
std::uint8_t fp8_bits(double x) {
    constexpr int BIAS = M == 3 ? 7 : 15;
    constexpr double LARGEST = M == 3 ? 448.0 : 57344.0;
    if (std::isnan(x)) return 0x7f;
    const int sign = std::signbit(x) ? 128 : 0;
    const double bounded = std::fmin(std::fabs(x), LARGEST);
    const int exponent = bounded == 0.0 ? 1 - BIAS : std::max(std::ilogb(bounded), 1 - BIAS);
    const double steps = std::nearbyint(std::ldexp(bounded, M - exponent));  // may round up to the next exponent
    return (std::uint8_t)(sign + ((exponent + BIAS - 1) << M) + (int)steps);
}

template <int M>
double fp8_value(std::uint8_t code) {
    constexpr int BIAS = M == 3 ? 7 : 15;
    const int exponent = (code & 127) >> M, fraction = code & ((1 << M) - 1);
    const bool special = M == 3 ? (code & 127) == 127 : exponent == 31;
    double size = exponent ? std::ldexp((1 << M) + fraction, exponent - BIAS - M) : std::ldexp(fraction, 1 - BIAS - M);
    if (special) size = M == 2 && fraction == 0 ? INFINITY : NAN;
    return code & 128 ? -size : size;
}

template <int M>
std::uint16_t to_fp8(double high, double low) {
    return (std::uint16_t)(fp8_bits<M>(high) << 8 | fp8_bits<M>(low));
}
template <int M>
std::uint16_t to_fp8(Pair<F16> pair) { return to_fp8<M>(pair.high, pair.low); }
template <int M>
Pair<F16> from_fp8(std::uint16_t codes) {
    return {nearest<F16>(fp8_value<M>((std::uint8_t)codes)), nearest<F16>(fp8_value<M>((std::uint8_t)(codes >> 8)))};
}

}  // namespace ptx_on_cpu
