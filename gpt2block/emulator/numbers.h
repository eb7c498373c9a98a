// Arithmetic functions that CUDA adds to C++. Approximate functions such as __expf are as accurate here as C's. Included
// by cuda_on_cpu.h.
#pragma once

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((std::uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((std::int64_t)a * b >> 32); }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umul24(unsigned a, unsigned b) { return a * b; }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a < b ? b - a : a - b); }
inline unsigned __sad(int a, int b, unsigned c) { return c + (unsigned)(a < b ? b - a : a - b); }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

inline int __hadd(int a, int b) { return (int)(((std::int64_t)a + b) >> 1); }  // the mean, rounded down
inline int __rhadd(int a, int b) { return (int)(((std::int64_t)a + b + 1) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((std::uint64_t)a + b) >> 1); }
inline unsigned __urhadd(unsigned a, unsigned b) { return (unsigned)(((std::uint64_t)a + b + 1) >> 1); }

// Byte i of the result is selected by nibble i of `selector`: 0 to 3 from x, 4 to 7 from y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const std::uint64_t bytes = (std::uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}

inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((std::uint64_t)high << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((std::uint64_t)high << 32 | low) >> (n & 31));
}

inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned n) {
    return n < 32 ? __funnelshift_l(low, high, n) : low;
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned n) {
    return n < 32 ? __funnelshift_r(low, high, n) : high;
}

inline float __int_as_float(int x) { return cuda_on_cpu::bits<float>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits<double>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits<long long>(x); }
inline double __hiloint2double(int high, int low) {
    return cuda_on_cpu::bits<double>((std::uint64_t)(unsigned)high << 32 | (unsigned)low);
}
inline int __double2hiint(double x) { return (int)(cuda_on_cpu::bits<std::uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return cuda_on_cpu::bits<int>(x); }

// noexcept, as the C library may declare rsqrtf, too.
inline float rsqrtf(float x) noexcept { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) noexcept { return 1.0 / sqrt(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }

inline long long clock64() { return cuda_on_cpu::clock_cycles(); }

#define __builtin_assume(condition) ((void)0)

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}

template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}
