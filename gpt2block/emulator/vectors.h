// CUDA's vector types and their make_ functions, which are inlined as in low_precision.h. Included by cuda_on_cpu.h.
#pragma once

// A vector of 2 or 4 elements is aligned to its size, up to 16 bytes.
#define VECTORS(T, NAME)                                                                  \
    struct NAME##1 {                                                                      \
        T x;                                                                              \
    };                                                                                    \
    struct alignas(2 * sizeof(T)) NAME##2 {                                               \
        T x, y;                                                                           \
    };                                                                                    \
    struct NAME##3 {                                                                      \
        T x, y, z;                                                                        \
    };                                                                                    \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) NAME##4 {                     \
        T x, y, z, w;                                                                     \
    };                                                                                    \
    __forceinline__ constexpr NAME##1 make_##NAME##1(T x) { return {x}; }                 \
    __forceinline__ constexpr NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
    __forceinline__ constexpr NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
    __forceinline__ constexpr NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

VECTORS(signed char, char)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
VECTORS(unsigned short, ushort)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(long, long)
VECTORS(unsigned long, ulong)
VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong)
VECTORS(float, float)
VECTORS(double, double)
#undef VECTORS
