// The part of __nv_bfloat16 that the kernels use: storage, and conversions that round to nearest even. The loader puts
// the kernel file and its includes into an unnamed namespace, so this header includes nothing itself.
#pragma once

struct alignas(2) __nv_bfloat16 {
    std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 h) { return cuda_on_cpu::bits<float>((std::uint32_t)h.bits << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    const std::uint32_t bits = cuda_on_cpu::bits<std::uint32_t>(f);
    if (std::isnan(f)) return {0x7fff};
    return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
