// FP8 numbers, one byte each. Included by lib/storage.cuh.
//
//   E5M2   sign, 5 exponent bits, 2 fraction bits: the upper byte of a __half
//   E4M3   sign, 4 exponent bits, 3 fraction bits. Shifted by one bit, it is a __half with 1/256 of the value. E4M3 has
//          no infinity. Its two NaN codes are 0x7f and 0xff
//
// FiniteE4M3 is E4M3 without NaN: its conversion to float returns +-480 for the NaN codes, which saves instructions
// before sm_89.
#pragma once
#include <cuda_fp16.h>

struct E5M2 {
    static constexpr unsigned FRACTION = 2, BIAS = 15, NOT_A_NUMBER = 0x7e;
    static constexpr float LARGEST = 57344.0f, BEYOND = 65536.0f;  // BEYOND: has code 0x7c, infinity
    unsigned char bits;

    static __device__ __forceinline__ void widen(unsigned bytes, float* v);
    static __device__ __forceinline__ unsigned halves(unsigned bytes, int pair);  // bytes `pair`, `pair` + 1 as __half
    static __device__ __forceinline__ E5M2 narrow(float value);
};

template <bool HAS_NAN>
struct AnyE4M3 {
    static constexpr unsigned FRACTION = 3, BIAS = 7, NOT_A_NUMBER = 0x7f;
    static constexpr float LARGEST = 448.0f, BEYOND = 480.0f;  // BEYOND: has code 0x7f, NaN
    unsigned char bits;

    static __device__ __forceinline__ void widen(unsigned bytes, float* v);
    static __device__ __forceinline__ unsigned halves(unsigned bytes, int pair);  // needs sm_89 or newer
    static __device__ __forceinline__ AnyE4M3 narrow(float value);
};
typedef AnyE4M3<true> E4M3;
typedef AnyE4M3<false> FiniteE4M3;

// Converts two E4M3 numbers, in the upper bytes of the two 16-bit halves of `halves`, to __half numbers with 1/256 of
// their values. With HAS_NAN, adding 1 to the lowest of the seven bits of a code carries out of these bits only if all
// seven bits are set, which is a NaN code. The carry sets the highest exponent bit of the __half, which makes it NaN.
template <bool HAS_NAN>
__device__ __forceinline__ unsigned shift_e4m3(unsigned halves) {
    halves = (halves & 0x80008000u) | (halves >> 1 & 0x3f803f80u);
    if (HAS_NAN) halves |= ((halves & 0x3f803f80u) + 0x00800080u) & 0x40004000u;
    return halves;
}

__device__ __forceinline__ float widen_half(unsigned bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}

// Converts one FP8 number to float through __half, which represents subnormal FP8 numbers exactly.
__device__ __forceinline__ float widen(E5M2 value) { return widen_half(value.bits << 8); }

template <bool HAS_NAN>
__device__ __forceinline__ float widen(AnyE4M3<HAS_NAN> value) {
    return 256.0f * widen_half(shift_e4m3<HAS_NAN>(value.bits << 8));
}

// Returns bytes `pair` and `pair` + 1 of the four bytes, each as the upper byte of a 16-bit number.
__device__ __forceinline__ unsigned upper_bytes(unsigned bytes, int pair) {
    return __byte_perm(bytes, 0, pair ? 0x3424 : 0x1404);
}

__device__ __forceinline__ unsigned E5M2::halves(unsigned bytes, int pair) { return upper_bytes(bytes, pair); }

#if __CUDA_ARCH__ >= 890
template <bool HAS_NAN>
__device__ __forceinline__ unsigned AnyE4M3<HAS_NAN>::halves(unsigned bytes, int pair) {
    unsigned found;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(found) : "h"((unsigned short)(bytes >> 8 * pair)));
    return found;
}
#endif

// Converts four FP8 bytes to floats, the lowest byte first. Two bytes are processed at a time: shifts and masks act on
// both 16-bit halves of a register at once.
__device__ __forceinline__ void E5M2::widen(unsigned bytes, float* v) {
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        const unsigned halves = upper_bytes(bytes, pair);
        v[pair] = widen_half(halves);
        v[pair + 1] = widen_half(halves >> 16);
    }
}

template <bool HAS_NAN>
__device__ __forceinline__ void AnyE4M3<HAS_NAN>::widen(unsigned bytes, float* v) {
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
#if __CUDA_ARCH__ >= 890  // sm_89 and newer have a conversion instruction
        const unsigned two = halves(bytes, pair);
        const float scale = 1.0f;
#else
        const unsigned two = shift_e4m3<HAS_NAN>(upper_bytes(bytes, pair));
        const float scale = 256.0f;
#endif
        v[pair] = scale * widen_half(two);
        v[pair + 1] = scale * widen_half(two >> 16);
    }
}

// Returns the FP8 number nearest to `magnitude`, ties to even, in the lowest 7 bits of the result. `magnitude` is at
// least 0 or NaN. Numbers larger than `most` become `most`: LARGEST for saturation, or BEYOND, whose code is infinity
// or NaN. NaN stays NaN.
//
//   Let |x| lie between 2^e and 2^(e+1). With F fraction bits, FP8 numbers there are 2^(e-F) apart. Subnormal numbers
//   are as far apart as the smallest normal numbers, so e has a minimum. Floats near 2^(e-F+23) are also 2^(e-F) apart.
//   Adding 2^(e-F+23) to |x| therefore makes the hardware round |x| to an FP8 number, and the lowest bits of the sum
//   are |x| in units of 2^(e-F).
//
//      |x|                1.0110011...     * 2^e
//      + 2^(e-F+23)  100...01.10           F = 2: the sum ends at the last FP8 bit
//      its lowest byte      110            plus the exponent field of e - 1, to which the leading bit of |x| adds one
//
// A carry out of the fraction increments e, as required. This addition is the only float arithmetic, so the result is
// the same on every architecture. The numbers that -ftz=true flushes to zero are zero in FP8 as well. The integer
// arithmetic is unsigned, because NaN can give any sum; the caller masks the result.
template <typename E>
__device__ __forceinline__ unsigned encode_fp8(float magnitude, float most = E::LARGEST) {
    constexpr unsigned CUT = 23 - E::FRACTION;              // number of fraction bits of a float that FP8 lacks
    constexpr unsigned EXPONENT = 0x7f800000;               // mask of a float's exponent
    constexpr unsigned LOWEST = (127 + 1 - E::BIAS) << 23;  // exponent bits of the smallest normal number, as a float
    // The difference between e >> CUT and the exponent bits of the FP8 byte. It is even, so adding it before rounding
    // does not change how ties are rounded.
    constexpr unsigned OFFSET = -(LOWEST >> CUT) & 0xff;
    static_assert(OFFSET % 2 == 0, "a tie is rounded to the even number of steps");
    const float x = fminf(magnitude, most);
    const unsigned e = max((unsigned)__float_as_int(x) & EXPONENT, LOWEST);
    const unsigned power = e + ((CUT << 23) + OFFSET);  // a float: the exponent, plus OFFSET in its lowest bits
    const unsigned sum = __float_as_int(x + __int_as_float(power));
    return magnitude == magnitude ? sum + (e >> CUT) : E::NOT_A_NUMBER;
}

template <typename E>
__device__ __forceinline__ unsigned char code_fp8(float value) {
    const unsigned sign = (unsigned)__float_as_int(value) >> 24 & 0x80u;
    return (unsigned char)(sign | (encode_fp8<E>(fabsf(value)) & 0x7fu));
}

__device__ __forceinline__ E5M2 E5M2::narrow(float value) { return {code_fp8<E5M2>(value)}; }

template <bool HAS_NAN>
__device__ __forceinline__ AnyE4M3<HAS_NAN> AnyE4M3<HAS_NAN>::narrow(float value) {
    return {code_fp8<AnyE4M3>(value)};
}
