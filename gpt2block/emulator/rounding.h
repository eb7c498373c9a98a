// Rounding to float16 and bfloat16: to nearest even, in a single rounding. Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

// Rounds x + rest to float by rounding to odd; rest is less than half a unit in the last place of x. An inexact result
// becomes the neighbor whose last bit is odd. A second rounding, to a shorter format, then equals a single rounding.
inline float odd(double x, double rest = 0.0) {
    const float near = (float)x;
    if (std::isnan(x) || std::isinf(x)) return near;
    const double error = x - near;  // exact; infinite if `near` is infinite
    const double missing = error != 0.0 ? error : rest;
    if (missing == 0.0) return near;
    const bool beyond = std::signbit(missing) != std::signbit(near);  // `near` is larger in magnitude
    return bits<float>((bits<std::uint32_t>(near) - beyond) | 1u);
}

inline float odd_sum(double a, double b) {
    const double sum = a + b, part = sum - a;
    return odd(sum, (a - (sum - part)) + (b - part));
}

template <typename T>
float odd_number(T x) {  // rounds a number of any arithmetic type to odd
    if constexpr (std::is_integral_v<T> && sizeof(T) == 8) {
        return odd_sum((double)(x >> 32) * 0x1p32, (double)(x & 0xffffffff));
    } else {
        return odd((double)x);
    }
}

inline float fp16_value(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
    if (exponent == 0) {  // subnormal: fraction * 2^-24 is exact
        const float value = std::ldexp((float)fraction, -24);
        return sign ? -value : value;
    }
    const std::uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return bits<float>(sign | wide << 23 | fraction << 13);
}

inline std::uint16_t fp16_bits(float f) {
    const std::uint32_t own = bits<std::uint32_t>(f), sign = own >> 16 & 0x8000u;
    const float value = std::fabs(f);
    if (std::isnan(f)) return 0x7fff;
    std::uint32_t half;
    if (value >= 65520.0f) {  // halfway between the largest finite number and the next step
        half = 0x7c00;
    } else if (value < 0x1p-14f) {  // a multiple of 2^-24; nearbyint rounds ties to even
        half = (std::uint32_t)std::nearbyint(std::ldexp(value, 24));
    } else {
        const std::uint32_t magnitude = own & 0x7fffffffu;
        half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

inline float bf16_value(std::uint16_t bfloat) { return bits<float>((std::uint32_t)bfloat << 16); }

inline std::uint16_t bf16_bits(float f) {
    const std::uint32_t own = bits<std::uint32_t>(f);
    if (std::isnan(f)) return 0x7fff;
    return static_cast<std::uint16_t>((own + 0x7fffu + (own >> 16 & 1)) >> 16);
}

}  // namespace cuda_on_cpu
