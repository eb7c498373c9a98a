// Handlers of integer arithmetic, logic, comparisons, and of moves and choices.
#pragma once
#include "compare.h"

#include <limits>

namespace alu {

using s128 = __int128;
using u128 = unsigned __int128;

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr unsigned WIDTH = 8 * sizeof(T);

// Calls make with a value of the C++ type for an integer type of PTX. Returns null for other types. SIGNS: whether the
// sign of the type matters. MIN_BITS: bits of the shortest type on which there are operations: 8, 16 or 32.
template <bool SIGNS = true, unsigned MIN_BITS = 16, class F>
auto for_type(const Type& type, F make) -> decltype(make(0)) {
    if (type.kind == 'f' || type.kind == 'p') return nullptr;
    if constexpr (SIGNS) {
        if (type.kind == 's') return for_type<false, MIN_BITS>({'u', type.bits, ""}, [&](auto unsigned_) {
            return make(std::make_signed_t<decltype(unsigned_)>());
        });
    }
    if constexpr (MIN_BITS <= 8) {
        if (type.bits == 8) return make(uint8_t());
    }
    if constexpr (MIN_BITS <= 16) {
        if (type.bits == 16) return make(uint16_t());
    }
    return type.bits == 32 ? make(uint32_t()) : type.bits == 64 ? make(uint64_t()) : nullptr;
}

// --- d = f(a, b, ...) for a function of integers

template <class T, class F>
static void mapped(Warp& w, const Instr& i, Mask active) {
    w.map<T>(i, active, F());
}
template <class F>
constexpr Handler rows(F) {  // of 64 bits, whatever the type
    static_assert(std::is_empty_v<F>);
    return mapped<uint64_t, F>;
}
template <unsigned MIN_BITS = 16, class F>
constexpr Pick integers(F) {
    return [](Form& f) {
        return for_type<true, MIN_BITS>(f.type(), [](auto t) -> Handler { return mapped<decltype(t), F>; });
    };
}
template <unsigned MIN_BITS = 16, class F>
constexpr Pick bits(F) {  // the sign of the type does not matter
    return [](Form& f) {
        return for_type<false, MIN_BITS>(f.type(), [](auto t) -> Handler { return mapped<decltype(t), F>; });
    };
}

// Only the first operand has the type.
template <class T, class F>
static void mapped_first(Warp& w, const Instr& i, Mask active) {
    const auto of_bits = [](uint64_t a, auto... others) -> uint64_t { return (Unsigned<T>)(T)F()((T)a, others...); };
    w.map<uint64_t>(i, active, of_bits, std::make_index_sequence<arity<F, T>()>());
}
template <unsigned MIN_BITS = 16, class F>
constexpr Pick first(F) {
    return [](Form& f) {
        return for_type<true, MIN_BITS>(f.type(), [](auto t) -> Handler { return mapped_first<decltype(t), F>; });
    };
}

// The result, and a third operand, have twice the width.
template <class T, class R, class F>
static void widened(Warp& w, const Instr& i, Mask active) {
    const auto wide = [](uint64_t a, uint64_t b, auto... c) -> uint64_t { return (R)F()((R)(T)a, (R)(T)b, (R)c...); };
    w.map<uint64_t>(i, active, wide, std::make_index_sequence<arity<F, T>()>());
}
template <class F>
Handler pick_wide(const Type& type) {
    if (type.bits == 16) return type.is_signed() ? widened<int16_t, uint32_t, F> : widened<uint16_t, uint32_t, F>;
    return type.is_signed() ? widened<int32_t, uint64_t, F> : widened<uint32_t, uint64_t, F>;
}
template <class F>
constexpr Pick wide(F) {
    return [](Form& f) { return pick_wide<F>(f.type()); };
}

// --- functions of integers

template <class T>
T high(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, s128, u128>;
    return (T)((Wide)a * (Wide)b >> WIDTH<T>);
}

template <class T>
int64_t product24(T a, T b) {
    return (int64_t)((T)((uint32_t)a << 8) >> 8) * (int64_t)((T)((uint32_t)b << 8) >> 8);
}

template <class T>
T limited(s128 x) {
    return (T)std::clamp<s128>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
}

template <class T>
T reversed(T a) {
    T r = 0;
    for (unsigned k = 0; k < WIDTH<T>; ++k) r |= (a >> k & 1) << (WIDTH<T> - 1 - k);
    return r;
}

template <class T>
T field(T a, uint64_t at, uint64_t length) {  // bfe
    at &= 255, length &= 255;
    if (length == 0) return 0;
    if (at >= WIDTH<T>) return a < 0 ? -1 : 0;
    length = std::min(length, WIDTH<T> - at);
    return (T)((Unsigned<T>)a << (WIDTH<T> - at - length)) >> (WIDTH<T> - length);
}

template <class T>
T inserted(T a, uint64_t b, uint64_t at, uint64_t length) {  // bfi
    at &= 255, length &= 255;
    if (at >= WIDTH<T>) return (T)b;
    const T mask = (T)((length >= WIDTH<T> ? ~T(0) : (T(1) << length) - 1) << at);
    return (T)(((T)b & ~mask) | (a << at & mask));
}

template <class T>
uint32_t highest(T a) {  // bfind
    const Unsigned<T> bits = a < 0 ? ~a : a;
    return bits ? 63 - __builtin_clzll(bits) : ~0u;
}

template <class T>
T shifted(T a, uint32_t right) {
    return right < WIDTH<T> ? a >> right : a < 0 ? -1 : 0;
}

inline uint64_t both(uint64_t low, uint64_t high) { return high << 32 | (uint32_t)low; }

inline uint64_t permuted(uint64_t a, uint64_t b, uint64_t selectors) {  // prmt
    uint32_t r = 0;
    for (int k = 0; k < 4; ++k) {
        const unsigned s = selectors >> 4 * k & 15;
        const uint8_t byte = (uint8_t)(both(a, b) >> 8 * (s & 7));
        r |= (uint32_t)(s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
    }
    return r;
}

static void lop3(Warp& w, const Instr& i, Mask active) {
    const uint64_t table = w.in(i, 4)[0];
    w.map(i, active, [=](uint64_t a, uint64_t b, uint64_t c) {
        uint32_t r = 0;
        for (int k = 0; k < 8; ++k) {
            if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        }
        return r;
    });
}

// Sums of products of 4 bytes, or of 2 halves and bytes, of which dp2a.hi takes the upper two.
template <int N>
static void dot(Warp& w, const Instr& i, Mask active) {
    constexpr int WIDE = 32 / N;
    const auto part = [](uint64_t x, int width, int k, bool is_signed) -> int64_t {
        x <<= 64 - width * (k + 1);
        return is_signed ? (int64_t)x >> (64 - width) : (int64_t)(x >> (64 - width));
    };
    const bool of_a = i.form->type(0).is_signed(), of_b = i.form->type(1).is_signed();
    const int at = i.form->has("hi") ? 2 : 0;
    w.map(i, active, [=](uint64_t a, uint64_t b, uint64_t c) {
        for (int k = 0; k < N; ++k) c += part(a, WIDE, k, of_a) * part(b, 8, k + at, of_b);
        return (uint32_t)c;
    });
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
        if (REMAINDER) d[l] = (Unsigned<T>)(minus ? 0 : x % y);
        else d[l] = (Unsigned<T>)(minus ? (T)(0 - (Unsigned<T>)x) : x / y);
    });
}
template <bool REMAINDER>
Handler pick_quotient(Form& f) {
    return for_type(f.type(), [](auto t) -> Handler { return divide<decltype(t), REMAINDER>; });
}

// --- comparisons, predicates, choices, moves

template <class T>
struct Integers {
    static unsigned of(uint64_t a, uint64_t b, bool) { return (T)a < (T)b ? 1 : (T)a == (T)b ? 2 : 4; }
};

template <bool SET>
Handler pick_comparison(Form& f) {
    if (!compare::prepare(f)) return nullptr;
    return for_type(f.type(SET ? 1 : 0), [](auto t) -> Handler {
        return SET ? compare::set<Integers<decltype(t)>> : compare::setp<Integers<decltype(t)>>;
    });
}

// Predicates are masks of lanes. A literal is a row.
template <class F>
constexpr Handler predicates(F) {
    return [](Warp& w, const Instr& i, Mask active) {
        const auto value = [&](int k) -> Mask {
            return i.op[k].kind == Operand::row ? (w.in(i, k)[0] ? ~0u : 0) : w.predicate(i, k);
        };
        if constexpr (arity<F, Mask>() == 1) w.set_predicate(i, 0, active, F()(value(1)));
        else w.set_predicate(i, 0, active, F()(value(1), value(2)));
    };
}

// Pairs of 16-bit integers in a register.
template <class F>
constexpr Handler pairs(F) {
    return rows([](uint64_t a, uint64_t b) -> uint64_t {
        return (uint16_t)F()(a & 0xffff, b & 0xffff) | (uint32_t)(uint16_t)F()(a >> 16, b >> 16) << 16;
    });
}
template <class F>
constexpr Handler signed_pairs(F) {
    return pairs([](uint64_t a, uint64_t b) { return F()((int16_t)a, (int16_t)b); });
}

inline uint64_t ones_of(const Type& type) { return ~0ull >> (64 - std::min(type.bits, 64u)); }

static void selp(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), ones = ones_of(i.form->type());
    const Mask holds = w.predicate(i, 3);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (holds >> l & 1 ? a[l] : b[l]) & ones; });
}

static void slct(Warp& w, const Instr& i, Mask active) {
    const uint64_t ones = ones_of(i.form->type());
    const bool real = i.form->type(1).kind == 'f';
    w.map(i, active, [=](uint64_t a, uint64_t b, uint64_t c) {  // of a number that is not negative, or -0, the first
        const uint32_t bits = (uint32_t)c;
        const bool first = real ? bits <= 0x7f800000 || bits == 0x80000000 : (int32_t)bits >= 0;
        return (first ? a : b) & ones;
    });
}

// Copies, packs a vector into a register, or unpacks a register. The parts of a vector have equal widths. A .b128 has
// two rows, as a vector of two 64-bit values has.
static void mov(Warp& w, const Instr& i, Mask active) {
    const int to = i.op[0].count, from = i.op[1].count;
    const Type& type = i.form->type();
    const Type into = {'b', type.bits / to, ""}, out_of = {'b', type.bits / from, ""};
    if (to == from) {
        for (int k = 0; k < to; ++k) {
            const uint64_t *a = w.in(i, 1, k), ones = ones_of(type);
            uint64_t* d = w.out(i, 0, k);
            for_lanes(active, [=](int l) { d[l] = a[l] & ones; });
        }
        return;
    }
    for_lanes(active, [&](int l) {
        u128 all = 0;
        for (int k = 0; k < from; ++k) all |= (u128)(w.in(i, 1, k)[l] & ones_of(out_of)) << out_of.bits * k;
        for (int k = 0; k < to; ++k) w.out(i, 0, k)[l] = (uint64_t)(all >> into.bits * k) & ones_of(into);
    });
}

static void clock(Warp& w, const Instr& i, Mask active) {
    uint64_t* d = w.out(i, 0);
    const uint64_t now = (uint64_t)w.machine.executed << (w.machine.variant % 2 * 10) & ones_of(i.form->type());
    for_lanes(active, [&](int l) { d[l] = now; });
}

constexpr auto smaller = [](auto a, auto b) { return std::min(a, b); };
constexpr auto larger = [](auto a, auto b) { return std::max(a, b); };
constexpr auto sum = [](auto a, auto b) { return a + b; };
constexpr auto difference = [](auto a, auto b) { return a - b; };

static const Rows rows_{
    {"add", bits(sum)},
    {"sub", bits(difference)},
    {"add.sat", integers<32>([](auto a, auto b) { return limited<decltype(a)>((s128)a + b); })},
    {"sub.sat", integers<32>([](auto a, auto b) { return limited<decltype(a)>((s128)a - b); })},
    {"add.u16x2", pairs(sum)},
    {"add.s16x2", pairs(sum)},
    {"sub.u16x2", pairs(difference)},
    {"sub.s16x2", pairs(difference)},
    {"min", integers(smaller)},
    {"max", integers(larger)},
    {"min.u16x2", pairs(smaller)},
    {"max.u16x2", pairs(larger)},
    {"min.s16x2", signed_pairs(smaller)},
    {"max.s16x2", signed_pairs(larger)},
    {"mul", bits([](auto a, auto b) { return (uint64_t)a * b; })},
    {"mad", bits([](auto a, auto b, auto c) { return (uint64_t)a * b + c; })},
    {"mul.hi", integers([](auto a, auto b) { return high(a, b); })},
    {"mad.hi", integers([](auto a, auto b, auto c) { return (uint64_t)high(a, b) + c; })},
    {"mad.hi.sat", integers<32>([](auto a, auto b, auto c) { return limited<decltype(a)>((s128)high(a, b) + c); })},
    {"mul.wide", wide([](auto a, auto b) { return a * b; })},
    {"mad.wide", wide([](auto a, auto b, auto c) { return a * b + c; })},
    {"mul24", integers<32>([](auto a, auto b) { return product24(a, b); })},
    {"mad24", integers<32>([](auto a, auto b, auto c) { return product24(a, b) + c; })},
    {"mul24.hi", integers<32>([](auto a, auto b) { return product24(a, b) >> 16; })},
    {"mad24.hi", integers<32>([](auto a, auto b, auto c) { return (product24(a, b) >> 16) + c; })},
    {"sad", integers([](auto a, auto b, auto c) { return c + (a < b ? (u128)b - a : (u128)a - b); })},
    {"div", pick_quotient<false>},
    {"rem", pick_quotient<true>},
    {"neg", bits([](auto a) { return 0 - a; })},
    {"abs", integers([](auto a) { return a < 0 ? 0 - (uint64_t)a : (uint64_t)a; })},
    {"and", bits([](auto a, auto b) { return a & b; })},
    {"or", bits([](auto a, auto b) { return a | b; })},
    {"xor", bits([](auto a, auto b) { return a ^ b; })},
    {"not", bits([](auto a) { return ~a; })},
    {"cnot", bits([](auto a) { return a == 0; })},
    {"and.pred", predicates([](auto a, auto b) { return a & b; })},
    {"or.pred", predicates([](auto a, auto b) { return a | b; })},
    {"xor.pred", predicates([](auto a, auto b) { return a ^ b; })},
    {"not.pred", predicates([](auto a) { return ~a; })},
    {"mov.pred", predicates([](auto a) { return a; })},
    // Distances of the type's width or more give 0 or the sign.
    {"shl", first([](auto a, uint32_t n) { return n < WIDTH<decltype(a)> ? (uint64_t)a << n : 0; })},
    {"shr", first([](auto a, uint32_t n) { return shifted(a, n); })},
    {"shf.l.clamp", rows([](auto a, auto b, auto n) { return both(a, b) << std::min<uint32_t>(n, 32) >> 32; })},
    {"shf.r.clamp", rows([](auto a, auto b, auto n) { return both(a, b) >> std::min<uint32_t>(n, 32) & ~0u; })},
    {"shf.l.wrap", rows([](auto a, auto b, auto n) { return both(a, b) << (n & 31) >> 32; })},
    {"shf.r.wrap", rows([](auto a, auto b, auto n) { return both(a, b) >> (n & 31) & ~0u; })},
    {"bfe", first<32>([](auto a, uint64_t at, uint64_t length) { return field(a, at, length); })},
    {"bfi", first<32>([](auto a, uint64_t b, uint64_t at, uint64_t length) { return inserted(a, b, at, length); })},
    {"bfind", integers<32>([](auto a) { return highest(a); })},
    {"bfind.shiftamt", integers<32>([](auto a) { return ~highest(a) ? WIDTH<decltype(a)> - 1 - highest(a) : ~0u; })},
    {"popc", bits<32>([](auto a) { return __builtin_popcountll(a); })},
    {"clz", bits<32>([](auto a) { return a ? __builtin_clzll(a) - (64 - WIDTH<decltype(a)>) : WIDTH<decltype(a)>; })},
    {"brev", bits<32>([](auto a) { return reversed(a); })},
    {"prmt", rows([](auto a, auto b, auto selectors) { return permuted(a, b, selectors); })},
    {"lop3", lop3},
    {"dp4a", dot<4>},
    {"dp2a", dot<2>},
    {"setp", pick_comparison<false>},
    {"set", pick_comparison<true>},
    {"selp", selp},
    {"slct", slct},
    {"mov", mov},
    {"clock", clock},
};

}  // namespace alu
