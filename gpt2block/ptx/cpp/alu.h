// Handlers of integer arithmetic, logic, comparisons, and of moves and choices.
#pragma once
#include "compare.h"
#include "machine.h"

#include <algorithm>
#include <type_traits>

namespace alu {

using s128 = __int128;
using u128 = unsigned __int128;

template <class T>
using Unsigned = std::make_unsigned_t<T>;

// Calls make with a value of the C++ type for an integer type of PTX. Returns null for other types. SIGNS: whether the sign
// of the type matters. BYTES: whether there are operations on bytes.
template <bool SIGNS = true, bool BYTES = false, class F>
Handler for_type(const Type& type, F make) {
    if constexpr (SIGNS) {
        if (type.kind != 's') return for_type<false, BYTES>(type, make);
        if constexpr (BYTES) {
            if (type.bits == 8) return make(int8_t());
        }
        return type.bits == 16 ? make(int16_t()) : type.bits == 32 ? make(int32_t()) : type.bits == 64 ? make(int64_t()) : nullptr;
    } else {
        if constexpr (BYTES) {
            if (type.bits == 8) return make(uint8_t());
        }
        return type.bits == 16 ? make(uint16_t()) : type.bits == 32 ? make(uint32_t()) : type.bits == 64 ? make(uint64_t()) : nullptr;
    }
}

// d = Op::of(a, b, ...) for N operands of type T. A result of another type is written with its own width.
template <class Op, class T, int N>
static void elementwise(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, N > 1 ? 2 : 1), *c = w.in(i, N > 2 ? 3 : 1);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        if constexpr (N == 1) d[l] = (Unsigned<decltype(Op::of(T()))>)Op::of((T)a[l]);
        if constexpr (N == 2) d[l] = (Unsigned<decltype(Op::of(T(), T()))>)Op::of((T)a[l], (T)b[l]);
        if constexpr (N == 3) d[l] = (Unsigned<decltype(Op::of(T(), T(), T()))>)Op::of((T)a[l], (T)b[l], (T)c[l]);
    });
}

template <class Op, int N>
Handler pick(const Type& type) {
    return for_type<Op::SIGNS>(type, [](auto zero) -> Handler { return elementwise<Op, decltype(zero), N>; });
}

#define OPERATION_(NAME, SIGNED, PARAMETERS, ...) \
    struct NAME {                                 \
        static constexpr bool SIGNS = SIGNED;     \
        template <class T>                        \
        static auto of PARAMETERS {               \
            __VA_ARGS__;                          \
        }                                         \
    };
#define OPERATION(NAME, ...) OPERATION_(NAME, true, __VA_ARGS__)
#define OF_BITS(NAME, ...) OPERATION_(NAME, false, __VA_ARGS__)  // the sign of the type does not matter

OF_BITS(Add, (T a, T b), return (T)((Unsigned<T>)a + (Unsigned<T>)b))
OF_BITS(Sub, (T a, T b), return (T)((Unsigned<T>)a - (Unsigned<T>)b))
OPERATION(AddSat, (T a, T b), const int64_t s = (int64_t)a + b; return (T)std::clamp<int64_t>(s, INT32_MIN, INT32_MAX))
OPERATION(SubSat, (T a, T b), const int64_t s = (int64_t)a - b; return (T)std::clamp<int64_t>(s, INT32_MIN, INT32_MAX))
OF_BITS(MulLo, (T a, T b), return (T)((u128)a * (u128)b))
OPERATION(Min, (T a, T b), return std::min(a, b))
OPERATION(Max, (T a, T b), return std::max(a, b))
OF_BITS(Neg, (T a), return (T)(0 - (Unsigned<T>)a))
OPERATION(Abs, (T a), return a < 0 ? (T)(0 - (Unsigned<T>)a) : a)
OF_BITS(And, (T a, T b), return (T)(a & b))
OF_BITS(Or, (T a, T b), return (T)(a | b))
OF_BITS(Xor, (T a, T b), return (T)(a ^ b))
OF_BITS(Not, (T a), return (T)~a)
OF_BITS(Cnot, (T a), return (T)(a == 0))
OPERATION(Sad, (T a, T b, T c), return (T)((Unsigned<T>)c + (a < b ? (Unsigned<T>)b - (Unsigned<T>)a : (Unsigned<T>)a - (Unsigned<T>)b)))
OF_BITS(Popc, (T a), return (uint32_t)__builtin_popcountll(a))
OF_BITS(Clz, (T a), return (uint32_t)(a ? __builtin_clzll(a) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T)))
OF_BITS(Brev, (T a), T r = 0; for (unsigned k = 0; k < 8 * sizeof(T); ++k) r |= (a >> k & 1) << (8 * sizeof(T) - 1 - k); return r)

template <bool HIGH>
struct Mul24 {
    static constexpr bool SIGNS = true;
    template <class T>
    static T of(T a, T b, T c) {
        const int64_t x = (int64_t)(T)((uint32_t)a << 8) >> 8, y = (int64_t)(T)((uint32_t)b << 8) >> 8;
        return (T)((uint32_t)((uint64_t)(x * y) >> (HIGH ? 16 : 0)) + (uint32_t)c);
    }
    template <class T>
    static T of(T a, T b) { return of(a, b, T(0)); }
};

template <class T>
using Wide = std::conditional_t<std::is_signed_v<T>, s128, u128>;

OPERATION(MulHi, (T a, T b), return (T)((Wide<T>)a * (Wide<T>)b >> 8 * sizeof(T)))
OF_BITS(MadLo, (T a, T b, T c), return (T)((u128)a * (u128)b + (u128)c))
OPERATION(MadHi, (T a, T b, T c), return (T)(((Wide<T>)a * (Wide<T>)b >> 8 * sizeof(T)) + (Wide<T>)c))

template <class T, class R, bool ADD>
static void wide(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, ADD ? 3 : 1);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (R)((R)((R)(T)a[l] * (R)(T)b[l]) + (ADD ? (R)c[l] : 0)); });
}

template <bool ADD>
Handler pick_wide(const Type& type) {
    return for_type(type, [](auto zero) -> Handler {
        using T = decltype(zero);
        if constexpr (sizeof(T) == 2) return wide<T, uint32_t, ADD>;
        if constexpr (sizeof(T) == 4) return wide<T, uint64_t, ADD>;
        return nullptr;
    });
}

// Shifts: the distance is always a .u32, and at least the width gives 0 or the sign.
OF_BITS(Shl, (T a, uint32_t n), return (T)(n >= 8 * sizeof(T) ? 0 : (Unsigned<T>)a << n))
OPERATION(Shr, (T a, uint32_t n), return (T)(n >= 8 * sizeof(T) ? (a < 0 ? -1 : 0) : a >> n))

template <class Op, class T>
static void shift(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *n = w.in(i, 2);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (Unsigned<T>)Op::of((T)a[l], (uint32_t)n[l]); });
}

template <class Op>
Handler pick_shift(Form& f) {
    return for_type<Op::SIGNS>(f.type(), [](auto zero) -> Handler { return shift<Op, decltype(zero)>; });
}

template <bool LEFT, bool WRAP>
static void funnel(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        const uint32_t n = WRAP ? c[l] & 31 : std::min<uint32_t>((uint32_t)c[l], 32);
        const uint64_t both = (uint32_t)b[l] * 0x100000000ull | (uint32_t)a[l];
        d[l] = LEFT ? (uint32_t)((both << n) >> 32) : (uint32_t)(both >> n);
    });
}

// Fields of bits: operands a, position, length.
OPERATION(Bfe, (T a, uint64_t at, uint64_t n),
          constexpr unsigned N = 8 * sizeof(T); at &= 255, n &= 255; if (n == 0) return T(0);
          if (at >= N) return (T)(a < 0 ? -1 : 0); n = std::min<uint64_t>(n, N - at);
          return (T)((T)((Unsigned<T>)a << (N - at - n)) >> (N - n)))

template <class T>
static void bfe(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (Unsigned<T>)Bfe::of((T)a[l], b[l], c[l]); });
}

template <class T>
static void bfi(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3), *n = w.in(i, 4);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        const unsigned at = c[l] & 255, bits = n[l] & 255;
        const T ones = (T)(bits >= 8 * sizeof(T) ? ~T(0) : (T(1) << bits) - 1);
        const T mask = (T)(at >= 8 * sizeof(T) ? 0 : ones << at);
        d[l] = (T)(((T)b[l] & ~mask) | (at >= 8 * sizeof(T) ? 0 : ((T)a[l] << at & mask)));
    });
}

template <bool AMOUNT>
struct Bfind {
    static constexpr bool SIGNS = true;
    template <class T>
    static uint32_t of(T a) {
        const Unsigned<T> bits = a < 0 ? ~a : a;
        if (!bits) return ~0u;
        const uint32_t top = 63 - __builtin_clzll(bits);
        return AMOUNT ? 8 * sizeof(T) - 1 - top : top;
    }
};

static void prmt(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        const uint64_t both = (uint32_t)b[l] * 0x100000000ull | (uint32_t)a[l];
        uint32_t r = 0;
        for (int k = 0; k < 4; ++k) {
            const unsigned s = c[l] >> 4 * k & 15;
            const uint8_t byte = (uint8_t)(both >> 8 * (s & 7));
            r |= (uint32_t)(s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
        }
        d[l] = r;
    });
}

static void lop3(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3), table = w.in(i, 4)[0];
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        uint32_t r = 0;
        for (int k = 0; k < 8; ++k) {
            if (table >> k & 1) r |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
        }
        d[l] = r;
    });
}

// Sums of products of 4 or 2 bytes. arg: whether a and b are signed, and whether the upper bytes of b count (dp2a.hi).
template <int N>
static void dot(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3);
    const int64_t* arg = i.form->arg;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        uint32_t sum = (uint32_t)c[l];
        for (int k = 0; k < N; ++k) {
            const int width = 32 / N, at = arg[2] ? k + 2 : k;
            const int64_t x = (int64_t)(a[l] << (64 - width - width * k)), y = (int64_t)(b[l] << (56 - 8 * at));
            sum += (uint32_t)((arg[0] ? x >> (64 - width) : (int64_t)((uint64_t)x >> (64 - width))) *
                              (arg[1] ? y >> 56 : (int64_t)((uint64_t)y >> 56)));
        }
        d[l] = sum;
    });
}

template <int N>
Handler pick_dot(Form& f) {
    f.arg[0] = f.type(0).is_signed(), f.arg[1] = f.type(1).is_signed(), f.arg[2] = f.has("hi");
    return dot<N>;
}

// Quotients. Division by zero is defined by no standard: it is a finding.
template <class T, bool REMAINDER>
static void divide(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        const T x = (T)a[l], y = (T)b[l];
        if (y == 0) w.machine.fail(w, i, l, "division", "an integer is divided by zero");
        const bool minus = std::is_signed_v<T> && y == (T)-1;  // the smallest integer has no negative
        const T q = minus ? Neg::of(x) : x / y;
        d[l] = (Unsigned<T>)(REMAINDER ? (minus ? 0 : x % y) : q);
    });
}

template <bool REMAINDER>
Handler pick_quotient(Form& f) {
    if (f.type().kind == 'f') return pick_float(f);
    return for_type(f.type(), [](auto zero) -> Handler { return divide<decltype(zero), REMAINDER>; });
}

// Comparisons of integers. arg[0]: accepted relations (bits: less, equal, greater); arg[1]: how to join with a predicate.
template <class T>
Mask compare(Warp& w, const Instr& i, int k, Mask active, unsigned accepts) {
    const uint64_t *a = w.in(i, k), *b = w.in(i, k + 1);
    Mask holds = 0;
    for_lanes(active, [&](int l) {
        const T x = (T)a[l], y = (T)b[l];
        holds |= (Mask)(accepts >> (x < y ? 0 : x == y ? 1 : 2) & 1) << l;
    });
    return holds;
}

template <class T>
static void setp(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const int a = i.count - (arg[1] == floats::ALONE ? 2 : 3);
    const Mask holds = compare<T>(w, i, a, active, (unsigned)arg[0]);
    const Mask other = arg[1] == floats::ALONE ? 0 : w.predicate(i, a + 2);
    w.set_predicate(i, 0, active, floats::join((int)arg[1], holds, other));
    if (a == 2) w.set_predicate(i, 1, active, floats::join((int)arg[1], ~holds, other));
}

template <class T>
static void set(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const Mask other = arg[1] == floats::ALONE ? 0 : w.predicate(i, 3);
    const Mask holds = floats::join((int)arg[1], compare<T>(w, i, 1, active, (unsigned)arg[0]), other);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = holds >> l & 1 ? (uint64_t)arg[2] : 0; });
}

template <bool SET>
Handler pick_comparison(Form& f) {
    const Type& type = f.type(SET ? 1 : 0);
    if (type.kind == 'f') return pick_float(f);
    static const std::unordered_map<std::string, int> unsigned_names = {{"lo", 1}, {"ls", 3}, {"hi", 4}, {"hs", 6}};
    f.arg[0] = floats::accepted(f), f.arg[1] = floats::joined(f);
    for (const std::string& word : f.modifiers) {
        if (unsigned_names.count(word)) f.arg[0] = unsigned_names.at(word);
    }
    f.arg[2] = f.type().is("f32") ? 0x3f800000 : 0xffffffff;
    if (f.arg[0] == 0) return nullptr;
    return for_type(type, [](auto zero) -> Handler { return SET ? set<decltype(zero)> : setp<decltype(zero)>; });
}

// Predicates are masks of lanes.
template <class Op, int N>
static void of_predicates(Warp& w, const Instr& i, Mask active) {
    const auto value = [&](int k) -> Mask {  // a literal is a row
        return i.op[k].kind == Operand::row ? (w.in(i, k)[0] ? ~0u : 0) : w.predicate(i, k);
    };
    if constexpr (N == 1) w.set_predicate(i, 0, active, Op::of(value(1)));
    if constexpr (N == 2) w.set_predicate(i, 0, active, Op::of(value(1), value(2)));
}

OPERATION(Same, (T a), return a)

template <class Op, int N>
Handler pick_logic(Form& f) {
    return f.type().kind == 'p' ? of_predicates<Op, N> : pick<Op, N>(f.type());
}

template <class Op, int N>
Handler pick_number(Form& f) {
    return f.type().kind == 'f' ? pick_float(f) : pick<Op, N>(f.type());
}

// Pairs of 16-bit integers in a register.
template <class Op, class T>
static void pairs(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        const uint16_t low = (uint16_t)Op::of((T)a[l], (T)b[l]), high = (uint16_t)Op::of((T)(a[l] >> 16), (T)(b[l] >> 16));
        d[l] = (uint32_t)high << 16 | low;
    });
}

template <class Op, class Sat>
Handler pick_sum(Form& f) {
    const Type& type = f.type();
    if (type.kind == 'f') return pick_float(f);
    if (type.is("u16x2")) return pairs<Op, uint16_t>;
    if (type.is("s16x2")) return pairs<Op, int16_t>;
    return f.has("sat") ? elementwise<Sat, int32_t, 2> : pick<Op, 2>(type);
}

static void selp(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), ones = (uint64_t)i.form->arg[0];
    const Mask holds = w.predicate(i, 3);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (holds >> l & 1 ? a[l] : b[l]) & ones; });
}

static void slct(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, 3), ones = (uint64_t)i.form->arg[0];
    const bool real = i.form->type(1).kind == 'f';
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {  // of a number that is not negative, or -0, the first
        const uint32_t bits = (uint32_t)c[l];
        const bool first = real ? bits <= 0x7f800000 || bits == 0x80000000 : (int32_t)bits >= 0;
        d[l] = (first ? a[l] : b[l]) & ones;
    });
}

static uint64_t ones_of(const Type& type) { return type.bits >= 64 ? ~0ull : (1ull << type.bits) - 1; }

// Copies, packs a vector into a register, or unpacks a register. The parts of a vector have equal widths. A .b128 has two
// rows, as a vector of two 64-bit values has.
static void mov(Warp& w, const Instr& i, Mask active) {
    const int to = i.op[0].count, from = i.op[1].count;
    const unsigned bits = (unsigned)i.form->arg[1], into = bits / to, out_of = bits / from;
    const uint64_t ones = (uint64_t)i.form->arg[0], low = into >= 64 ? ~0ull : (1ull << into) - 1;
    if (to == from) {
        for (int k = 0; k < to; ++k) {
            const uint64_t* a = w.in(i, 1, k);
            uint64_t* d = w.out(i, 0, k);
            for_lanes(active, [&](int l) { d[l] = a[l] & ones; });
        }
        return;
    }
    for_lanes(active, [&](int l) {
        u128 all = 0;
        for (int k = 0; k < from; ++k) {
            all |= (u128)(w.in(i, 1, k)[l] & (out_of >= 64 ? ~0ull : (1ull << out_of) - 1)) << out_of * k;
        }
        for (int k = 0; k < to; ++k) w.out(i, 0, k)[l] = (uint64_t)(all >> into * k) & low;
    });
}

static void clock(Warp& w, const Instr& i, Mask active) {
    uint64_t* d = w.out(i, 0);
    const uint64_t now = (uint64_t)w.machine.executed << (10 * w.machine.variant);
    for_lanes(active, [&](int l) { d[l] = now & (uint64_t)i.form->arg[0]; });
}

template <Handler RUN>
Handler masked(Form& f) {
    f.arg[0] = (int64_t)ones_of(f.type()), f.arg[1] = f.type().bits;
    return RUN;
}

static const Register all_[] = {
    {{"add"}, pick_sum<Add, AddSat>},
    {{"sub"}, pick_sum<Sub, SubSat>},
    {{"mul"}, [](Form& f) { return f.has("wide") ? pick_wide<false>(f.type()) : f.has("hi") ? pick<MulHi, 2>(f.type()) : pick_number<MulLo, 2>(f); }},
    {{"mad"}, [](Form& f) { return f.has("wide") ? pick_wide<true>(f.type()) : f.has("hi") ? pick<MadHi, 3>(f.type()) : pick_number<MadLo, 3>(f); }},
    {{"mul24"}, [](Form& f) { return f.has("hi") ? pick<Mul24<true>, 2>(f.type()) : pick<Mul24<false>, 2>(f.type()); }},
    {{"mad24"}, [](Form& f) { return f.has("hi") ? pick<Mul24<true>, 3>(f.type()) : pick<Mul24<false>, 3>(f.type()); }},
    {{"sad"}, pick_number<Sad, 3>},
    {{"div"}, pick_quotient<false>},
    {{"rem"}, pick_quotient<true>},
    {{"min"}, pick_sum<Min, Min>},
    {{"max"}, pick_sum<Max, Max>},
    {{"neg"}, pick_number<Neg, 1>},
    {{"abs"}, pick_number<Abs, 1>},
    {{"and"}, pick_logic<And, 2>},
    {{"or"}, pick_logic<Or, 2>},
    {{"xor"}, pick_logic<Xor, 2>},
    {{"not"}, pick_logic<Not, 1>},
    {{"cnot"}, pick_number<Cnot, 1>},
    {{"shl"}, pick_shift<Shl>},
    {{"shr"}, pick_shift<Shr>},
    {{"shf"}, [](Form& f) -> Handler { return f.has("l") ? f.has("wrap") ? funnel<true, true> : funnel<true, false> : f.has("wrap") ? funnel<false, true> : funnel<false, false>; }},
    {{"bfe"}, [](Form& f) { return for_type(f.type(), [](auto zero) -> Handler { return bfe<decltype(zero)>; }); }},
    {{"bfi"}, [](Form& f) -> Handler { return f.type().bits == 64 ? bfi<uint64_t> : bfi<uint32_t>; }},
    {{"bfind"}, [](Form& f) { return f.has("shiftamt") ? pick<Bfind<true>, 1>(f.type()) : pick<Bfind<false>, 1>(f.type()); }},
    {{"popc"}, pick_number<Popc, 1>},
    {{"clz"}, pick_number<Clz, 1>},
    {{"brev"}, pick_number<Brev, 1>},
    {{"prmt"}, [](Form& f) -> Handler { return f.modifiers.empty() ? prmt : nullptr; }},
    {{"lop3"}, [](Form& f) -> Handler { return f.modifiers.empty() ? lop3 : nullptr; }},
    {{"dp4a"}, pick_dot<4>},
    {{"dp2a"}, pick_dot<2>},
    {{"setp"}, pick_comparison<false>},
    {{"set"}, pick_comparison<true>},
    {{"selp"}, masked<selp>},
    {{"slct"}, masked<slct>},
    {{"mov"}, [](Form& f) { return f.type().kind == 'p' ? of_predicates<Same, 1> : masked<mov>(f); }},
    {{"clock"}, masked<clock>},
};

}  // namespace alu
