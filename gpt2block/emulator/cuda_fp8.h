// FP8 numbers: conversions from and to wider types, rounded to nearest even as gpt2block.fp8.to_fp8 rounds.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned __nv_fp8x4_storage_t;
typedef enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

namespace cuda_on_cpu_fp8 {

// With F fraction bits, FP8 numbers from 2^e to 2^(e+1) are multiples of 2^(e-F). The leading bit 2^F of the number of
// such steps adds one to the exponent field, as a carry from rounding does.
inline unsigned char byte_of(double x, __nv_saturation_t saturate, __nv_fp8_interpretation_t format) {
    const int fraction = format == __NV_E4M3 ? 3 : 2, lowest = format == __NV_E4M3 ? -6 : -14;
    const int largest = format == __NV_E4M3 ? 0x7e : 0x7b, sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return sign | (format == __NV_E4M3 ? 0x7f : 0x7e);
    const double magnitude = std::fmin(std::fabs(x), 1e6);
    int e = magnitude > 0 ? std::ilogb(magnitude) : lowest;
    e = e < lowest ? lowest : e;
    const int code = ((e - lowest) << fraction) + (int)std::nearbyint(std::ldexp(magnitude, fraction - e));
    const int most = saturate == __NV_SATFINITE ? largest : largest + 1;
    return sign | (code < most ? code : most);
}

inline float value_of(unsigned char byte, __nv_fp8_interpretation_t format) {
    const int fraction = format == __NV_E4M3 ? 3 : 2, bias = format == __NV_E4M3 ? 7 : 15, code = byte & 0x7f;
    const int exponent = code >> fraction, steps = code & ((1 << fraction) - 1);
    const float units = exponent ? steps + (1 << fraction) : steps;
    float value = std::ldexp(units, (exponent ? exponent : 1) - bias - fraction);
    if (format == __NV_E4M3 ? code == 0x7f : code > 0x7c) value = NAN;
    if (format == __NV_E5M2 && code == 0x7c) value = INFINITY;
    return byte & 0x80 ? -value : value;
}

}  // namespace cuda_on_cpu_fp8

#define SETTINGS __nv_saturation_t saturate, __nv_fp8_interpretation_t format

inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, SETTINGS) {
    return cuda_on_cpu_fp8::byte_of(x, saturate, format);
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, SETTINGS) {
    return cuda_on_cpu_fp8::byte_of(x, saturate, format);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw h, SETTINGS) {
    return __nv_cvt_float_to_fp8(cuda_on_cpu::fp16_value(h.x), saturate, format);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw b, SETTINGS) {
    return __nv_cvt_float_to_fp8(cuda_on_cpu::bf16_value(b.x), saturate, format);
}
inline __nv_fp8x2_storage_t __nv_cvt_double2_to_fp8x2(double2 v, SETTINGS) {
    return __nv_cvt_double_to_fp8(v.x, saturate, format) | __nv_cvt_double_to_fp8(v.y, saturate, format) << 8;
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, SETTINGS) {
    return __nv_cvt_float_to_fp8(v.x, saturate, format) | __nv_cvt_float_to_fp8(v.y, saturate, format) << 8;
}
inline __nv_fp8x2_storage_t __nv_cvt_halfraw2_to_fp8x2(__half2_raw h, SETTINGS) {
    return __nv_cvt_float2_to_fp8x2({cuda_on_cpu::fp16_value(h.x), cuda_on_cpu::fp16_value(h.y)}, saturate, format);
}
inline __nv_fp8x2_storage_t __nv_cvt_bfloat16raw2_to_fp8x2(__nv_bfloat162_raw b, SETTINGS) {
    return __nv_cvt_float2_to_fp8x2({cuda_on_cpu::bf16_value(b.x), cuda_on_cpu::bf16_value(b.y)}, saturate, format);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t format) {
    return __half(cuda_on_cpu_fp8::value_of(x, format));
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t format) {
    return __half2(cuda_on_cpu_fp8::value_of(x & 0xff, format), cuda_on_cpu_fp8::value_of(x >> 8, format));
}
#undef SETTINGS

// Defines the classes of one, two and four numbers of a format.
#define FP8(name, FORMAT)                                                                                             \
    struct __nv_fp8_##name {                                                                                          \
        __nv_fp8_storage_t __x;                                                                                       \
        __nv_fp8_##name() = default;                                                                                  \
        template <typename T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>                                     \
        __forceinline__ explicit __nv_fp8_##name(T value)                                                             \
            : __x(__nv_cvt_double_to_fp8(value, __NV_SATFINITE, FORMAT)) {}                                           \
        __forceinline__ explicit __nv_fp8_##name(__half h) : __nv_fp8_##name((float)h) {}                             \
        __forceinline__ explicit __nv_fp8_##name(__nv_bfloat16 b) : __nv_fp8_##name((float)b) {}                      \
        __forceinline__ explicit operator float() const { return cuda_on_cpu_fp8::value_of(__x, FORMAT); }            \
        __forceinline__ explicit operator double() const { return (float)*this; }                                     \
        __forceinline__ explicit operator __half() const { return (float)*this; }                                     \
        __forceinline__ explicit operator __nv_bfloat16() const { return (float)*this; }                              \
        __forceinline__ explicit operator bool() const { return (__x & 0x7f) != 0; }                                  \
    };                                                                                                                \
    struct alignas(2) __nv_fp8x2_##name {                                                                             \
        __nv_fp8x2_storage_t __x;                                                                                     \
        __nv_fp8x2_##name() = default;                                                                                \
        __forceinline__ explicit __nv_fp8x2_##name(float2 v)                                                          \
            : __x(__nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, FORMAT)) {}                                             \
        __forceinline__ explicit __nv_fp8x2_##name(double2 v)                                                         \
            : __x(__nv_cvt_double2_to_fp8x2(v, __NV_SATFINITE, FORMAT)) {}                                            \
        __forceinline__ explicit __nv_fp8x2_##name(__half2 h)                                                         \
            : __x(__nv_cvt_halfraw2_to_fp8x2(h, __NV_SATFINITE, FORMAT)) {}                                           \
        __forceinline__ explicit __nv_fp8x2_##name(__nv_bfloat162 b)                                                  \
            : __x(__nv_cvt_bfloat16raw2_to_fp8x2(b, __NV_SATFINITE, FORMAT)) {}                                       \
        __forceinline__ explicit operator float2() const {                                                            \
            return {cuda_on_cpu_fp8::value_of(__x & 0xff, FORMAT), cuda_on_cpu_fp8::value_of(__x >> 8, FORMAT)};      \
        }                                                                                                             \
        __forceinline__ explicit operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, FORMAT); }         \
    };                                                                                                                \
    struct alignas(4) __nv_fp8x4_##name {                                                                             \
        __nv_fp8x4_storage_t __x;                                                                                     \
        __nv_fp8x4_##name() = default;                                                                                \
        __forceinline__ explicit __nv_fp8x4_##name(float4 v)                                                          \
            : __x(__nv_fp8x2_##name(float2{v.x, v.y}).__x |                                                           \
                  (unsigned)__nv_fp8x2_##name(float2{v.z, v.w}).__x << 16) {}                                         \
        __forceinline__ explicit __nv_fp8x4_##name(__half2 low, __half2 high)                                         \
            : __x(__nv_fp8x2_##name(low).__x | (unsigned)__nv_fp8x2_##name(high).__x << 16) {}                        \
        __forceinline__ explicit operator float4() const {                                                            \
            __nv_fp8x2_##name low, high;                                                                              \
            low.__x = __x & 0xffff, high.__x = __x >> 16;                                                             \
            const float2 a(low), b(high);                                                                             \
            return {a.x, a.y, b.x, b.y};                                                                              \
        }                                                                                                             \
    };
FP8(e4m3, __NV_E4M3)
FP8(e5m2, __NV_E5M2)
#undef FP8
