// Arithmetic of PTX instructions. A register is an unsigned integer of 16, 32 or 64 bits, or a bool for a predicate. The
// functions below receive values of the type that the instruction names. Included by ptx.h.
#pragma once

namespace ptx_on_cpu {

using cuda_on_cpu::bits;

struct F16 {
    std::uint16_t bits;
    operator double() const { return cuda_on_cpu::fp16_value(bits); }
};

struct BF16 {
    std::uint16_t bits;
    operator double() const { return cuda_on_cpu::bf16_value(bits); }
};

template <typename F>
struct Pair {  // f16x2 or bf16x2
    F low, high;
};

template <typename T>
constexpr bool is_pair = false;
template <typename F>
constexpr bool is_pair<Pair<F>> = true;
template <typename T>
constexpr bool is_16 = std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

// Rounds x + rest to nearest even; rest is less than half a unit in the last place of x.
template <typename F>
F nearest(double x, double rest = 0.0) {
    if constexpr (std::is_same_v<F, F16>) return {cuda_on_cpu::fp16_bits(cuda_on_cpu::odd(x, rest))};
    else if constexpr (std::is_same_v<F, BF16>) return {cuda_on_cpu::bf16_bits(cuda_on_cpu::odd(x, rest))};
    else return (F)x;
}

// Reads a register or an immediate operand as a T.
template <typename T, typename R>
__forceinline__ T as(R value) {
    if constexpr (std::is_integral_v<T>) {
        static_assert(std::is_integral_v<R>, "an operand of an integer instruction is a floating-point number");
        return (T)value;
    } else if constexpr (std::is_same_v<R, double>) {
        return nearest<T>(value);
    } else {
        static_assert(sizeof(T) == sizeof(R), "the size of a register is not that of the instruction's type");
        return bits<T>(value);
    }
}

template <typename R, typename V>
__forceinline__ void set(R& target, const V& value) {
    if constexpr (std::is_integral_v<V>) target = (R)value;  // extends the sign of a narrow signed integer
    else target = bits<R>(value);
}

// Applies a function to a number, or to both numbers of pairs.
template <typename Op, typename T, typename... Rest>
T lanes(Op op, T a, Rest... rest) {
    if constexpr (is_pair<T>) return {op(a.low, rest.low...), op(a.high, rest.high...)};
    else return op(a, rest...);
}

template <typename T>
T ftz(T value) {  // replaces subnormal numbers by zeros of the same sign
    return lanes([](auto v) {
        typedef decltype(v) F;
        const double least = std::is_same_v<F, F16> ? 0x1p-14 : 0x1p-126;
        if constexpr (std::is_integral_v<F>) return v;
        else return std::fabs((double)v) < least ? nearest<F>(std::copysign(0.0, (double)v)) : v;
    }, value);
}

template <typename T>
T sat(T value) {  // limits floating-point numbers to [0, 1]; NaN becomes 0
    return lanes([](auto v) { return v > 0.0 ? (v < 1.0 ? v : nearest<decltype(v)>(1.0)) : nearest<decltype(v)>(0.0); },
                 value);
}

template <typename T>
T relu(T value) {
    return lanes([](auto v) { return v <= 0.0 ? nearest<decltype(v)>(0.0) : v; }, value);
}

// --- arithmetic of integers and floating-point numbers

template <typename T>
T add(T a, T b) {
    return lanes([](auto x, auto y) {
        typedef decltype(x) N;
        if constexpr (std::is_integral_v<N>) return (N)((std::uint64_t)x + (std::uint64_t)y);
        else if constexpr (is_16<N>) return nearest<N>(cuda_on_cpu::odd_sum(x, y));
        else return x + y;
    }, a, b);
}

template <typename T>
T neg(T a) {
    return lanes([](auto x) {
        typedef decltype(x) N;
        if constexpr (std::is_integral_v<N>) return (N)(0 - (std::uint64_t)x);
        else if constexpr (is_16<N>) return N{(std::uint16_t)(x.bits ^ 0x8000)};
        else return -x;
    }, a);
}

template <typename T>
T sub(T a, T b) { return add(a, neg(b)); }

template <typename T>
T abs(T a) {
    return lanes([](auto x) {
        if constexpr (std::is_integral_v<decltype(x)>) return x < 0 ? neg(x) : x;
        else return std::signbit((double)x) ? neg(x) : x;
    }, a);
}

template <typename T>
T mul(T a, T b) {
    return lanes([](auto x, auto y) {
        if constexpr (is_16<decltype(x)>) return nearest<decltype(x)>((double)x * (double)y);
        else return x * y;
    }, a, b);
}

template <typename T>
T fma(T a, T b, T c) {
    return lanes([](auto x, auto y, auto z) {
        typedef decltype(x) N;
        if constexpr (is_16<N>) return nearest<N>(cuda_on_cpu::odd_sum((double)x * (double)y, z));
        else return std::fma(x, y, z);
    }, a, b, c);
}

template <typename T>
T mul_lo(T a, T b) { return (T)((std::uint64_t)a * (std::uint64_t)b); }
template <typename T>
T mul_hi(T a, T b) { return (T)((__int128)a * b >> 8 * sizeof(T)); }
template <>
inline std::uint64_t mul_hi(std::uint64_t a, std::uint64_t b) { return __umul64hi(a, b); }
template <typename T>
auto mul_wide(T a, T b) {
    typedef std::conditional_t<sizeof(T) == 4, std::int64_t, std::int32_t> Wide;
    return (std::conditional_t<std::is_signed_v<T>, Wide, std::make_unsigned_t<Wide>>)((__int128)a * b);
}

template <typename T>
T div(T a, T b) {
    if constexpr (!std::is_integral_v<T>) return a / b;
    else if (b == 0) return (T)-1;  // unspecified in PTX
    else return std::is_signed_v<T> && b == (T)-1 ? neg(a) : (T)(a / b);
}
template <typename T>
T rem(T a, T b) { return b == 0 ? a : std::is_signed_v<T> && b == (T)-1 ? (T)0 : (T)(a % b); }

template <typename T>
T sqrt(T a) { return std::sqrt(a); }
template <typename T>
T rcp(T a) { return 1 / a; }

template <typename T>
bool is_nan(T a) { return !(a == a); }

// Minimum or maximum. The number is returned if the other operand is NaN. -0 is less than +0.
#define EXTREME(name, op)                                                                                \
    template <typename T>                                                                                \
    T name(T a, T b) {                                                                                   \
        return lanes([](auto x, auto y) {                                                                \
            if constexpr (!std::is_integral_v<decltype(x)>) {                                            \
                if (x == y) return std::signbit((double)y) op std::signbit((double)x) ? x : y;           \
            }                                                                                            \
            return is_nan(y) || x op y ? x : y;                                                          \
        }, a, b);                                                                                        \
    }                                                                                                    \
    template <typename T>                                                                                \
    T name##_nan(T a, T b) {                                                                             \
        return lanes([](auto x, auto y) { return is_nan(x) ? x : is_nan(y) ? y : name(x, y); }, a, b);   \
    }
EXTREME(min, <)
EXTREME(max, >)
#undef EXTREME

// Comparisons. Ordered comparisons are false for NaN, unordered comparisons, whose name ends with u, are true.
#define COMPARISON(name, expression)       \
    template <typename T>                  \
    bool compare_##name(T a, T b) {        \
        return expression;                 \
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
COMPARISON(num, a == a && b == b)
COMPARISON(nan, a != a || b != b)
#undef COMPARISON

// --- bits

template <typename T>
T and_(T a, T b) { return a & b; }
template <typename T>
T or_(T a, T b) { return a | b; }
template <typename T>
T xor_(T a, T b) { return a ^ b; }
template <typename T>
T not_(T a) { return (T)~a; }
inline bool not_(bool a) { return !a; }
template <typename T>
T shl(T a, std::uint32_t n) { return n < 8 * sizeof(T) ? (T)((std::uint64_t)a << n) : (T)0; }
template <typename T>
T shr(T a, std::uint32_t n) { return n < 8 * sizeof(T) ? (T)(a >> n) : a < 0 ? (T)-1 : (T)0; }
template <typename T>
std::uint32_t popc(T a) { return __builtin_popcountll(a); }
template <typename T>
std::uint32_t clz(T a) { return a ? __builtin_clzll(a) - (64 - 8 * sizeof(T)) : 8 * sizeof(T); }
template <typename T>
T brev(T a) { return (T)(__brevll(a) >> (64 - 8 * sizeof(T))); }
template <typename T>
T selp(T a, T b, bool first) { return first ? a : b; }

template <typename T>
T bfe(T a, std::uint32_t first, std::uint32_t n) {  // extracts n bits, and extends their sign
    __int128 value = a;
    first = std::min(first & 255, 64u), n = std::min(n & 255, 64u);
    if (n == 0) return 0;
    value >>= first;
    return (T)(std::is_signed_v<T> ? value << (127 - (n - 1)) >> (127 - (n - 1)) : value & (((__int128)1 << n) - 1));
}

template <typename T>
T bfi(T from, T into, std::uint32_t first, std::uint32_t n) {  // replaces n bits of `into`
    for (std::uint32_t i = 0; i < (n & 255) && (first & 255) + i < 8 * sizeof(T); ++i) {
        const T one = (T)((T)1 << ((first & 255) + i));
        into = from >> i & 1 ? into | one : into & ~one;
    }
    return into;
}

inline std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const std::uint32_t nibble = selector >> 4 * i & 15;
        const std::uint32_t byte = (((std::uint64_t)b << 32 | a) >> 8 * (nibble & 7)) & 255;
        result |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;  // bit 3 of a nibble replicates the sign
    }
    return result;
}

inline std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t table) {
    std::uint32_t result = 0;
    for (int i = 0; i < 8; ++i) {
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return result;
}

}  // namespace ptx_on_cpu
