// Arithmetic and conversions whose name ends with the rounding mode: to nearest even (rn), toward zero (rz), down (rd)
// or up (ru). Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

template <typename T>
__forceinline__ void unknown(T& value) {  // keeps the compiler from computing with the value at compile time
    asm volatile("" : "+m"(value) : : "memory");
}

// Computes op(operands...) with the rounding mode `mode` of <cfenv>.
template <typename Op, typename... Operands>
__attribute__((noinline, no_sanitize("address", "undefined", "thread"))) auto rounded(int mode, Op op,
                                                                                      Operands... operands) {
    std::fesetround(mode);
    (unknown(operands), ...);
    auto result = op(operands...);
    unknown(result);
    std::fesetround(FE_TONEAREST);
    return result;
}

}  // namespace cuda_on_cpu

#define DIRECTED(type, name, parameters, result, ...)                                                      \
    inline type name##_rn parameters { return result; }                                                    \
    inline type name##_rz parameters {                                                                     \
        return cuda_on_cpu::rounded(FE_TOWARDZERO, [] parameters -> type { return result; }, __VA_ARGS__); \
    }                                                                                                      \
    inline type name##_rd parameters {                                                                     \
        return cuda_on_cpu::rounded(FE_DOWNWARD, [] parameters -> type { return result; }, __VA_ARGS__);   \
    }                                                                                                      \
    inline type name##_ru parameters {                                                                     \
        return cuda_on_cpu::rounded(FE_UPWARD, [] parameters -> type { return result; }, __VA_ARGS__);     \
    }
DIRECTED(float, __fadd, (float x, float y), x + y, x, y)
DIRECTED(float, __fsub, (float x, float y), x - y, x, y)
DIRECTED(float, __fmul, (float x, float y), x * y, x, y)
DIRECTED(float, __fdiv, (float x, float y), x / y, x, y)
DIRECTED(float, __fmaf, (float x, float y, float z), fmaf(x, y, z), x, y, z)
DIRECTED(float, __frcp, (float x), 1.0f / x, x)
DIRECTED(float, __fsqrt, (float x), sqrtf(x), x)
DIRECTED(double, __dadd, (double x, double y), x + y, x, y)
DIRECTED(double, __dsub, (double x, double y), x - y, x, y)
DIRECTED(double, __dmul, (double x, double y), x * y, x, y)
DIRECTED(double, __ddiv, (double x, double y), x / y, x, y)
DIRECTED(double, __fma, (double x, double y, double z), std::fma(x, y, z), x, y, z)
DIRECTED(double, __drcp, (double x), 1.0 / x, x)
DIRECTED(double, __dsqrt, (double x), std::sqrt(x), x)
DIRECTED(float, __int2float, (int x), (float)x, x)
DIRECTED(float, __uint2float, (unsigned x), (float)x, x)
DIRECTED(float, __ll2float, (long long x), (float)x, x)
DIRECTED(float, __ull2float, (unsigned long long x), (float)x, x)
DIRECTED(float, __double2float, (double x), (float)x, x)
DIRECTED(double, __ll2double, (long long x), (double)x, x)
DIRECTED(double, __ull2double, (unsigned long long x), (double)x, x)
#undef DIRECTED
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline float __frsqrt_rn(float x) { return (float)(1.0 / std::sqrt((double)x)); }

// Converts as a GPU does: NaN becomes 0, and a number out of range becomes the nearest number in range.
template <typename To, typename From>
To cuda_on_cpu_to_integer(From x) {
    if (std::isnan(x)) return 0;
    constexpr To largest = std::is_signed_v<To> ? To(~(To(1) << (8 * sizeof(To) - 1))) : To(~To(0));
    constexpr To smallest = To(~largest);
    if (x >= (From)largest) return largest;
    return x <= (From)smallest ? smallest : (To)x;
}

#define TO_INTEGER(from, to, name)                                                                     \
    inline to __##from##2##name##_rn(from x) { return cuda_on_cpu_to_integer<to>(std::nearbyint(x)); } \
    inline to __##from##2##name##_rz(from x) { return cuda_on_cpu_to_integer<to>(std::trunc(x)); }     \
    inline to __##from##2##name##_rd(from x) { return cuda_on_cpu_to_integer<to>(std::floor(x)); }     \
    inline to __##from##2##name##_ru(from x) { return cuda_on_cpu_to_integer<to>(std::ceil(x)); }
TO_INTEGER(float, int, int)
TO_INTEGER(float, unsigned, uint)
TO_INTEGER(float, long long, ll)
TO_INTEGER(float, unsigned long long, ull)
TO_INTEGER(double, int, int)
TO_INTEGER(double, unsigned, uint)
TO_INTEGER(double, long long, ll)
TO_INTEGER(double, unsigned long long, ull)
#undef TO_INTEGER
