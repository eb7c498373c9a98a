// The part of __half that the kernels use: storage, and conversions that round to nearest even. The loader puts the
// kernel file and its includes into an unnamed namespace, so this header includes nothing itself.
#pragma once

struct alignas(2) __half {
    std::uint16_t bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline unsigned short __half_as_ushort(__half h) { return h.bits; }

inline float __half2float(__half h) {
    const std::uint32_t sign = (h.bits & 0x8000u) << 16, exponent = h.bits >> 10 & 31, fraction = h.bits & 0x3ffu;
    if (exponent == 0) {  // subnormal: fraction * 2^-24 is exact
        const float value = std::ldexp((float)fraction, -24);
        return sign ? -value : value;
    }
    const std::uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return cuda_on_cpu::bits<float>(sign | wide << 23 | fraction << 13);
}

inline __half __float2half_rn(float f) {
    const std::uint32_t bits = cuda_on_cpu::bits<std::uint32_t>(f), sign = bits >> 16 & 0x8000u;
    const float value = std::fabs(f);
    if (std::isnan(f)) return {0x7fff};
    std::uint32_t half;
    if (value >= 65520.0f) {  // halfway between the largest finite number and the next step
        half = 0x7c00;
    } else if (value < 0x1p-14f) {  // a multiple of 2^-24; nearbyint rounds ties to even
        half = (std::uint32_t)std::nearbyint(std::ldexp(value, 24));
    } else {
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    }
    return {static_cast<std::uint16_t>(sign | half)};
}
