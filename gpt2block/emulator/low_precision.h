// A 16-bit float type and its functions. cuda_fp16.h and cuda_bf16.h include this file once each, and define the macros
// NUMBER (the type), PAIR (the type of two numbers) and NAME (its part of function names). A result is rounded once, to
// NUMBER. Results of exp and similar functions, which a GPU approximates, are the nearest numbers. The loader puts the
// kernel file and its includes into an unnamed namespace, so this header must not include other headers.
//
// All functions are inlined: -fsanitize=thread does not instrument the store of a call's result if it is a class.

#define JOIN3(a, b, c) a##b##c
#define JOIN(a, b, c) JOIN3(a, b, c)  // expands macros among the arguments first

struct alignas(2) NUMBER {
    std::uint16_t bits;

    NUMBER() = default;
    template <typename T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
    __forceinline__ NUMBER(T value) : bits(BITS_OF(cuda_on_cpu::odd_number(value))) {}
    template <typename T, std::enable_if_t<std::is_class_v<T> && std::is_convertible_v<T, float>, int> = 0>
    __forceinline__ explicit NUMBER(T value) : bits(BITS_OF(value)) {}  // converts the other 16-bit format

    __forceinline__ operator float() const { return VALUE_OF(bits); }
    __forceinline__ operator bool() const { return (bits & 0x7fff) != 0; }
#define TO(type) \
    __forceinline__ operator type() const { return cuda_on_cpu_to_integer<type>(std::trunc(VALUE_OF(bits))); }
    TO(signed char)
    TO(unsigned char)
    TO(char)
    TO(short)
    TO(unsigned short)
    TO(int)
    TO(unsigned)
    TO(long)
    TO(unsigned long)
    TO(long long)
    TO(unsigned long long)
#undef TO
};

struct alignas(4) PAIR {
    NUMBER x, y;

    PAIR() = default;
    __forceinline__ PAIR(const NUMBER& x, const NUMBER& y) : x(x), y(y) {}
};

// The bits of a number or a pair, as functions of cuda_fp8.h take them.
struct JOIN(NUMBER, _raw, ) {
    unsigned short x;

    JOIN(NUMBER, _raw, )() = default;
    __forceinline__ JOIN(NUMBER, _raw, )(NUMBER h) : x(h.bits) {}
    __forceinline__ operator NUMBER() const { return cuda_on_cpu::bits<NUMBER>(x); }
};

struct JOIN(PAIR, _raw, ) {
    unsigned short x, y;

    JOIN(PAIR, _raw, )() = default;
    __forceinline__ JOIN(PAIR, _raw, )(PAIR p) : x(p.x.bits), y(p.y.bits) {}
    __forceinline__ operator PAIR() const { return cuda_on_cpu::bits<PAIR>(*this); }
};

// --- conversions

__forceinline__ NUMBER JOIN(__ushort_as_, NAME, )(unsigned short bits) { return cuda_on_cpu::bits<NUMBER>(bits); }
__forceinline__ NUMBER JOIN(__short_as_, NAME, )(short bits) { return cuda_on_cpu::bits<NUMBER>(bits); }
__forceinline__ unsigned short JOIN(__, NAME, _as_ushort)(NUMBER h) { return h.bits; }
__forceinline__ short JOIN(__, NAME, _as_short)(NUMBER h) { return (short)h.bits; }

__forceinline__ float JOIN(__, NAME, 2float)(NUMBER h) { return VALUE_OF(h.bits); }
__forceinline__ NUMBER JOIN(__float2, NAME, )(float f) { return f; }
__forceinline__ NUMBER JOIN(__float2, NAME, _rn)(float f) { return f; }
__forceinline__ NUMBER JOIN(__double2, NAME, )(double f) { return f; }

// Directed rounding: start from the nearest number, and step to its neighbor if it lies on the wrong side of f.
__forceinline__ NUMBER JOIN(__float2, NAME, _rz)(float f) {
    NUMBER h = f;
    if (std::fabs(VALUE_OF(h.bits)) > std::fabs(f)) --h.bits;
    return h;
}
__forceinline__ NUMBER JOIN(__float2, NAME, _rd)(float f) {
    NUMBER h = f;
    if (VALUE_OF(h.bits) > f) h.bits += f > 0.0f ? -1 : 1;
    return h;
}
__forceinline__ NUMBER JOIN(__float2, NAME, _ru)(float f) {
    NUMBER h = f;
    if (VALUE_OF(h.bits) < f) h.bits += f > 0.0f ? 1 : -1;
    return h;
}

#define INTEGER(type, name)                                                    \
    __forceinline__ type JOIN(__, NAME, 2##name##_rn)(NUMBER h) {              \
        return cuda_on_cpu_to_integer<type>(std::nearbyint(VALUE_OF(h.bits))); \
    }                                                                          \
    __forceinline__ type JOIN(__, NAME, 2##name##_rz)(NUMBER h) { return h; }  \
    __forceinline__ type JOIN(__, NAME, 2##name##_rd)(NUMBER h) {              \
        return cuda_on_cpu_to_integer<type>(std::floor(VALUE_OF(h.bits)));     \
    }                                                                          \
    __forceinline__ type JOIN(__, NAME, 2##name##_ru)(NUMBER h) {              \
        return cuda_on_cpu_to_integer<type>(std::ceil(VALUE_OF(h.bits)));      \
    }                                                                          \
    __forceinline__ NUMBER JOIN(__##name##2, NAME, _rn)(type x) { return x; }
INTEGER(short, short)
INTEGER(unsigned short, ushort)
INTEGER(int, int)
INTEGER(unsigned, uint)
INTEGER(long long, ll)
INTEGER(unsigned long long, ull)
#undef INTEGER

__forceinline__ PAIR JOIN(make_, NAME, 2)(NUMBER x, NUMBER y) { return {x, y}; }
__forceinline__ PAIR JOIN(__halves2, NAME, 2)(NUMBER x, NUMBER y) { return {x, y}; }
__forceinline__ PAIR JOIN(__, NAME, JOIN(2, NAME, 2))(NUMBER h) { return {h, h}; }
__forceinline__ PAIR JOIN(__float2, NAME, 2_rn)(float f) { return {f, f}; }
__forceinline__ PAIR JOIN(__floats2, NAME, 2_rn)(float x, float y) { return {x, y}; }
__forceinline__ PAIR JOIN(__float22, NAME, 2_rn)(float2 f) { return {f.x, f.y}; }
__forceinline__ float2 JOIN(__, NAME, 22float2)(PAIR p) { return {p.x, p.y}; }
__forceinline__ float __low2float(PAIR p) { return p.x; }
__forceinline__ float __high2float(PAIR p) { return p.y; }
__forceinline__ NUMBER JOIN(__low2, NAME, )(PAIR p) { return p.x; }
__forceinline__ NUMBER JOIN(__high2, NAME, )(PAIR p) { return p.y; }
__forceinline__ PAIR JOIN(__low2, NAME, 2)(PAIR p) { return {p.x, p.x}; }
__forceinline__ PAIR JOIN(__high2, NAME, 2)(PAIR p) { return {p.y, p.y}; }
__forceinline__ PAIR JOIN(__lows2, NAME, 2)(PAIR p, PAIR q) { return {p.x, q.x}; }
__forceinline__ PAIR JOIN(__highs2, NAME, 2)(PAIR p, PAIR q) { return {p.y, q.y}; }
__forceinline__ PAIR __lowhigh2highlow(PAIR p) { return {p.y, p.x}; }

using ::__hadd;  // the function for integers

// --- arithmetic. The product of two numbers is exact in double. For quotients, sqrt and similar functions, the error
// of double is too small to change the rounded result.

__forceinline__ NUMBER operator+(NUMBER a, NUMBER b) {
    return cuda_on_cpu::odd_sum(VALUE_OF(a.bits), VALUE_OF(b.bits));
}
__forceinline__ NUMBER operator-(NUMBER a, NUMBER b) {
    return cuda_on_cpu::odd_sum(VALUE_OF(a.bits), -VALUE_OF(b.bits));
}
__forceinline__ NUMBER operator*(NUMBER a, NUMBER b) { return (double)VALUE_OF(a.bits) * VALUE_OF(b.bits); }
__forceinline__ NUMBER operator/(NUMBER a, NUMBER b) { return (double)VALUE_OF(a.bits) / VALUE_OF(b.bits); }
__forceinline__ NUMBER __hfma(NUMBER a, NUMBER b, NUMBER c) {
    return cuda_on_cpu::odd_sum((double)VALUE_OF(a.bits) * VALUE_OF(b.bits), VALUE_OF(c.bits));
}
__forceinline__ NUMBER operator+(NUMBER h) { return h; }
__forceinline__ NUMBER operator-(NUMBER h) { return -VALUE_OF(h.bits); }
__forceinline__ NUMBER __hneg(NUMBER h) { return -h; }
__forceinline__ NUMBER __habs(NUMBER h) { return std::fabs(VALUE_OF(h.bits)); }
__forceinline__ NUMBER __saturated(NUMBER h) { return __saturatef(VALUE_OF(h.bits)); }
__forceinline__ NUMBER __hfma_sat(NUMBER a, NUMBER b, NUMBER c) { return __saturated(__hfma(a, b, c)); }
__forceinline__ NUMBER __hfma_relu(NUMBER a, NUMBER b, NUMBER c) {
    const NUMBER h = __hfma(a, b, c);
    return VALUE_OF(h.bits) <= 0.0f ? NUMBER(0) : h;  // NaN is returned unchanged
}

__forceinline__ PAIR operator+(PAIR p) { return p; }
__forceinline__ PAIR operator-(PAIR p) { return {-p.x, -p.y}; }
__forceinline__ PAIR __hneg2(PAIR p) { return -p; }
__forceinline__ PAIR __habs2(PAIR p) { return {__habs(p.x), __habs(p.y)}; }
#define FMA(suffix)                                                            \
    __forceinline__ PAIR __hfma2##suffix(PAIR p, PAIR q, PAIR r) {             \
        return {__hfma##suffix(p.x, q.x, r.x), __hfma##suffix(p.y, q.y, r.y)}; \
    }
FMA()
FMA(_sat)
FMA(_relu)
#undef FMA

#define BINARY(op, name, pairs)                                                           \
    __forceinline__ PAIR operator op(PAIR p, PAIR q) { return {p.x op q.x, p.y op q.y}; } \
    __forceinline__ NUMBER& operator op##=(NUMBER& a, NUMBER b) { return a = a op b; }    \
    __forceinline__ PAIR& operator op##=(PAIR& p, PAIR q) { return p = p op q; }          \
    __forceinline__ NUMBER name(NUMBER a, NUMBER b) { return a op b; }                    \
    __forceinline__ PAIR pairs(PAIR p, PAIR q) { return p op q; }
BINARY(+, __hadd, __hadd2)
BINARY(-, __hsub, __hsub2)
BINARY(*, __hmul, __hmul2)
BINARY(/, __hdiv, __h2div)
#undef BINARY

#define VARIANTS(op, name)                                                                \
    __forceinline__ NUMBER name##_rn(NUMBER a, NUMBER b) { return a op b; }               \
    __forceinline__ PAIR name##2_rn(PAIR p, PAIR q) { return p op q; }                    \
    __forceinline__ NUMBER name##_sat(NUMBER a, NUMBER b) { return __saturated(a op b); } \
    __forceinline__ PAIR name##2_sat(PAIR p, PAIR q) {                                    \
        return {__saturated(p.x op q.x), __saturated(p.y op q.y)};                        \
    }
VARIANTS(+, __hadd)
VARIANTS(-, __hsub)
VARIANTS(*, __hmul)
#undef VARIANTS

#define STEP(op)                                                                      \
    __forceinline__ NUMBER& operator op##op(NUMBER& h) { return h = h op NUMBER(1); } \
    __forceinline__ NUMBER operator op##op(NUMBER& h, int) {                          \
        const NUMBER old = h;                                                         \
        h = h op NUMBER(1);                                                           \
        return old;                                                                   \
    }
STEP(+)
STEP(-)
#undef STEP

// --- comparisons: ordered comparisons are false for NaN, unordered comparisons, whose name ends with `u`, are true

#define COMPARISON(name, expression)                                                                          \
    __forceinline__ bool __h##name(NUMBER h, NUMBER k) {                                                      \
        const float a = VALUE_OF(h.bits), b = VALUE_OF(k.bits);                                               \
        return expression;                                                                                    \
    }                                                                                                         \
    __forceinline__ PAIR __h##name##2(PAIR p, PAIR q) {                                                       \
        return {(float)__h##name(p.x, q.x), (float)__h##name(p.y, q.y)};                                      \
    }                                                                                                         \
    __forceinline__ bool __hb##name##2(PAIR p, PAIR q) { return __h##name(p.x, q.x) && __h##name(p.y, q.y); } \
    __forceinline__ unsigned __h##name##2_mask(PAIR p, PAIR q) {                                              \
        return (__h##name(p.x, q.x) ? 0xffffu : 0u) | (__h##name(p.y, q.y) ? 0xffff0000u : 0u);               \
    }
COMPARISON(eq, a == b)
COMPARISON(ne, a < b || a > b)
COMPARISON(lt, a < b)
COMPARISON(le, a <= b)
COMPARISON(gt, a > b)
COMPARISON(ge, a >= b)
COMPARISON(equ, !(a < b || a > b))
COMPARISON(neu, a != b)
COMPARISON(ltu, !(a >= b))
COMPARISON(leu, !(a > b))
COMPARISON(gtu, !(a <= b))
COMPARISON(geu, !(a < b))
#undef COMPARISON

#define OPERATOR(op, name)                                                           \
    __forceinline__ bool operator op(NUMBER a, NUMBER b) { return __h##name(a, b); } \
    __forceinline__ bool operator op(PAIR p, PAIR q) { return __hb##name##2(p, q); }
OPERATOR(==, eq)
OPERATOR(!=, neu)
OPERATOR(<, lt)
OPERATOR(<=, le)
OPERATOR(>, gt)
OPERATOR(>=, ge)
#undef OPERATOR

__forceinline__ bool __hisnan(NUMBER h) { return std::isnan(VALUE_OF(h.bits)); }
__forceinline__ int __hisinf(NUMBER h) { return std::isinf(VALUE_OF(h.bits)) ? (h.bits & 0x8000 ? -1 : 1) : 0; }
__forceinline__ PAIR __hisnan2(PAIR p) { return {(float)__hisnan(p.x), (float)__hisnan(p.y)}; }

// Defines a minimum or maximum. It ignores a NaN, but its version _nan returns NaN. -0 is less than +0.
#define EXTREME(name, op)                                                                        \
    __forceinline__ NUMBER name##_nan(NUMBER a, NUMBER b) {                                      \
        if (__hisnan(a) || __hisnan(b)) return JOIN(__ushort_as_, NAME, )(0x7fff);               \
        if (VALUE_OF(a.bits) == VALUE_OF(b.bits)) return (short)a.bits op (short)b.bits ? a : b; \
        return VALUE_OF(a.bits) op VALUE_OF(b.bits) ? a : b;                                     \
    }                                                                                            \
    __forceinline__ NUMBER name(NUMBER a, NUMBER b) {                                            \
        if (__hisnan(a)) a = b;                                                                  \
        return name##_nan(a, __hisnan(b) ? a : b);                                               \
    }                                                                                            \
    __forceinline__ PAIR name##2(PAIR p, PAIR q) { return {name(p.x, q.x), name(p.y, q.y)}; }    \
    __forceinline__ PAIR name##2_nan(PAIR p, PAIR q) { return {name##_nan(p.x, q.x), name##_nan(p.y, q.y)}; }
EXTREME(__hmax, >)
EXTREME(__hmin, <)
#undef EXTREME

// --- functions

#define FUNCTION(name, expression)             \
    __forceinline__ NUMBER h##name(NUMBER h) { \
        const double v = VALUE_OF(h.bits);     \
        return expression;                     \
    }                                          \
    __forceinline__ PAIR h2##name(PAIR p) { return {h##name(p.x), h##name(p.y)}; }
FUNCTION(sqrt, std::sqrt(v))
FUNCTION(rsqrt, 1.0 / std::sqrt(v))
FUNCTION(rcp, 1.0 / v)
FUNCTION(exp, std::exp(v))
FUNCTION(exp2, std::exp2(v))
FUNCTION(exp10, std::pow(10.0, v))
FUNCTION(log, std::log(v))
FUNCTION(log2, std::log2(v))
FUNCTION(log10, std::log10(v))
FUNCTION(sin, std::sin(v))
FUNCTION(cos, std::cos(v))
FUNCTION(tanh, std::tanh(v))
FUNCTION(tanh_approx, std::tanh(v))
FUNCTION(ceil, std::ceil(v))
FUNCTION(floor, std::floor(v))
FUNCTION(trunc, std::trunc(v))
FUNCTION(rint, std::nearbyint(v))
#undef FUNCTION
#undef JOIN
#undef JOIN3
