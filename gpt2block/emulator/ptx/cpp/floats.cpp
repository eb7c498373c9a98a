// Handlers of floating-point instructions, and of all conversions.
#include "compare.h"

namespace floats {

using namespace numbers;

// Calls make with the format of a type. Returns null for other types. HALVES: whether there are operations on f16 and
// bf16, and on pairs of them.
template <bool HALVES, class Make>
Handler for_format(const Type& type, Make make) {
    if constexpr (HALVES) {
        if (type.is("f16") || type.is("f16x2")) return make(F16());
        if (type.is("bf16") || type.is("bf16x2")) return make(BF16());
    }
    return type.is("f32") ? make(F32()) : type.is("f64") ? make(F64()) : nullptr;
}

// --- d = f(a, b, ...)

// How an operation is applied to bits: to numbers of the host, to doubles of which the result is not exact, to bits.
template <class F>
struct OfHost {
    template <class Op, class... A>
    static uint64_t apply(Way way, A... a) { return finish<F>(Op()(host<F>(a)...), way); }
};
template <class F>
struct OfDouble {
    template <class Op, class... A>
    static uint64_t apply(Way way, A... a) { return finish<F>(Op()(value<F>(a)...), way); }
};
template <class F>
struct OfBits {
    template <class Op, class... A>
    static uint64_t apply(Way, A... a) { return Op()(F(), a...); }
};

enum Known { NOTHING, NEAREST, NEAREST_FTZ };  // what the compiler knows of the way: .rn without .sat or .relu

template <class Op, class F, class Apply, Known KNOWN, std::size_t... K>
void mapped(Warp& w, const Instr& i, Mask active, std::index_sequence<K...> sequence) {
    const Way way = KNOWN == NOTHING ? i.form->way : Way{.ftz = KNOWN == NEAREST_FTZ};
    const auto one = [=](auto... a) { return Apply::template apply<Op>(way, (way.ftz ? F::flushed(a) : a)...); };
    const Rounding rounding(way.round);
    if (F::BITS == 16 && i.form->type().bits == 32) {
        const auto two = [=](auto... a) { return one((a & 0xffff)...) | one((a >> 16)...) << 16; };
        return w.map<uint64_t>(i, active, two, sequence);
    }
    w.map<uint64_t>(i, active, one, sequence);
}

template <class Op, class F, class Apply, Known KNOWN, int N>
void arithmetic(Warp& w, const Instr& i, Mask active) {
    mapped<Op, F, Apply, KNOWN>(w, i, active, std::make_index_sequence<N>());
}

template <template <class> class Apply, bool HALVES, int N, class Op>
constexpr Pick pick(Op) {
    return [](Form& f) {
        return for_format<HALVES>(f.type(), [&](auto format) -> Handler {
            using F = decltype(format);
            const bool known = f.way.round == Round::nearest && !f.way.sat && !f.way.relu;
            if constexpr (F::BITS == 32) {
                if (known && f.way.ftz) return arithmetic<Op, F, Apply<F>, NEAREST_FTZ, N>;
                if (known) return arithmetic<Op, F, Apply<F>, NEAREST, N>;
            }
            return arithmetic<Op, F, Apply<F>, NOTHING, N>;
        });
    };
}

// --- comparisons

template <class F>
struct Numbers {
    static unsigned of(uint64_t a, uint64_t b, bool ftz) { return relation<F>(a, b, ftz); }
};

template <bool SET>
Handler pick_comparison(Form& f) {
    if (!compare::prepare(f)) return nullptr;
    return for_format<true>(f.type(SET ? 1 : 0), [](auto format) -> Handler {
        using Relation = Numbers<decltype(format)>;
        return SET ? compare::set<Relation> : compare::setp<Relation>;
    });
}

// Op: whether a number, of which the sign is left out, is of a kind.
template <class Op, class F>
void tested(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    w.set_predicate(i, 0, active, lanes_where(active, [=](int l) { return Op()(F(), a[l] & F::MAGNITUDE); }));
}
template <class Op>
constexpr Pick test(Op) {
    return [](Form& f) {
        return for_format<false>(f.type(), [](auto format) -> Handler {
            return tested<Op, decltype(format)>;
        });
    };
}

// --- conversions: from bits to doubles, which are exact or rounded to odd, and from there to bits

struct Conversion {
    Type to, from;  // of an element
    bool pair;
    void (*decode)(const uint64_t* bits, int shift, const Conversion&, const Way&, double* x);
    uint64_t (*encode)(double x, const Conversion&, const Way&);
};

template <class F>
void decode(const uint64_t* bits, int shift, const Conversion&, const Way& way, double* x) {
    const uint64_t ones = F::MAGNITUDE | F::SIGN;
    for (int l = 0; l < LANES; ++l) x[l] = value<F>(bits[l] >> shift & ones, way.ftz && F::BITS == 32);
}
template <class F>
uint64_t encode(double x, const Conversion&, const Way& given) {
    Way way = given;
    way.ftz &= F::BITS == 32;
    return finish<F>(x, way) << (std::is_same_v<F, TF32> ? 13 : 0);
}

inline uint64_t extended(uint64_t x, const Type& type) {
    const int unused = 64 - (int)type.bits;
    return type.is_signed() ? (uint64_t)((int64_t)(x << unused) >> unused) : x << unused >> unused;
}
static void decode_integer(const uint64_t* bits, int, const Conversion& c, const Way&, double* x) {
    const bool is_signed = c.from.is_signed();
    for (int l = 0; l < LANES; ++l) {
        const uint64_t whole = extended(bits[l], c.from);
        x[l] = c.to.bits < 64 ? odd_integer(whole, is_signed) : is_signed ? (double)(int64_t)whole : (double)whole;
    }
}
static uint64_t encode_integer(double x, const Conversion& c, const Way&) {
    return to_integer(x, c.to.bits, c.to.is_signed(), c.from.bits == 64);
}

static void cvt(Warp& w, const Instr& i, Mask active) {
    const Conversion& c = *reinterpret_cast<const Conversion*>(i.form->arg[0]);
    const Way& way = i.form->way;
    const Rounding rounding(way.round);
    uint64_t made[LANES] = {};
    double x[LANES];
    for (int part = 0; part < 1 + c.pair; ++part) {
        const bool packs = i.count > 2;  // d = {a, b}: a becomes the upper half
        const uint64_t* from = w.in(i, packs && !part ? 2 : 1);
        c.decode(from, packs ? 0 : part * (int)c.from.bits, c, way, x);
        for_lanes(active, [&](int l) {
            if (way.integral) x[l] = std::nearbyint(x[l]);
            made[l] |= c.encode(x[l], c, way) << part * c.to.bits;
        });
    }
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = made[l]; });
}

static void cvt_integers(Warp& w, const Instr& i, Mask active) {
    const Type &to = i.form->type(0), &from = i.form->type(1);
    const uint64_t most = ~0ull >> (64 - to.bits + to.is_signed());
    w.map(i, active, [&](uint64_t x) {
        x = extended(x, from);
        const bool negative = from.is_signed() && (int64_t)x < 0;
        if (i.form->way.sat && !negative) x = std::min(x, most);
        if (i.form->way.sat && negative) x = to.is_signed() ? std::max((int64_t)x, (int64_t)~most) : 0;
        return extended(x, to);
    });
}

// Completes a conversion with the functions for its types. Returns whether both are known.
static bool choose(Conversion& c) {
    const auto each = [&](const char* name, auto format) {
        if (c.from.is(name)) c.decode = decode<decltype(format)>;
        if (c.to.is(name)) c.encode = encode<decltype(format)>;
    };
    if (c.from.kind != 'f') c.decode = decode_integer;
    if (c.to.kind != 'f') c.encode = encode_integer;
    each("f16", F16()), each("bf16", BF16()), each("f32", F32()), each("f64", F64());
    each("e4m3", E4M3()), each("e5m2", E5M2());
    if (c.to.is("tf32")) c.encode = encode<TF32>;
    return c.decode && c.encode;
}

static Handler pick_cvt(Form& f) {
    if (f.types.size() != 2) return nullptr;
    if (f.type(0).kind != 'f' && f.type(1).kind != 'f') return cvt_integers;
    const auto is_pair = [](const Type& type) { return type.name.find("x2") != std::string::npos; };
    const auto element = [&](const Type& type) {
        return is_pair(type) ? type_named(type.name.substr(0, type.name.size() - 2)) : type;
    };
    auto c = std::make_shared<Conversion>(Conversion{element(f.type(0)), element(f.type(1)), is_pair(f.type(0))});
    if ((is_pair(f.type(1)) && !c->pair) || !choose(*c)) return nullptr;
    f.way.finite |= c->to.bits == 8 && c->to.kind == 'f';
    f.arg[0] = reinterpret_cast<int64_t>(c.get());
    f.details = c;
    return cvt;
}

// --- the table

using std::fma;
constexpr auto less = [](auto f, uint64_t a, uint64_t b) { return extreme<decltype(f)>(a, b, false, false); };
constexpr auto larger = [](auto f, uint64_t a, uint64_t b) { return extreme<decltype(f)>(a, b, true, false); };
constexpr auto less_or_nan = [](auto f, uint64_t a, uint64_t b) { return extreme<decltype(f)>(a, b, false, true); };
constexpr auto larger_or_nan = [](auto f, uint64_t a, uint64_t b) { return extreme<decltype(f)>(a, b, true, true); };
constexpr auto sign_and_size = [](auto f, uint64_t a, uint64_t b) { return (a & f.SIGN) | (b & f.MAGNITUDE); };
constexpr auto product_and_sum = [](auto a, auto b, auto c) { return fma(a, b, c); };
// div.approx does not divide by more than 2^126.
constexpr auto rough_quotient = [](double a, double b) {
    return std::fabs(b) > 0x1p126 && std::isfinite(b) ? a * std::copysign(0.0, b) : a / b;
};
// tanh.approx.f32 has a relative error of up to 2^-11: the result is rounded to 11 of the 53 bits of a double.
constexpr auto rough_tanh = [](double a) {
    const double exact = std::tanh(a), large = exact * (0x1p42 + 1);
    return large - (large - exact);
};

static const Rows rows_{
    {"add", pick<OfHost, true, 2>([](auto a, auto b) { return a + b; })},
    {"sub", pick<OfHost, true, 2>([](auto a, auto b) { return a - b; })},
    {"mul", pick<OfHost, true, 2>([](auto a, auto b) { return a * b; })},
    {"fma", pick<OfHost, true, 3>(product_and_sum)},
    {"mad", pick<OfHost, true, 3>(product_and_sum)},
    {"div", pick<OfHost, false, 2>([](auto a, auto b) { return a / b; })},
    {"rcp", pick<OfHost, false, 1>([](auto a) { return 1 / a; })},
    {"sqrt", pick<OfHost, false, 1>([](auto a) { return std::sqrt(a); })},
    // Approximate instructions of a GPU return the number nearest to the exact result here, except for tanh of f32.
    {"div.full", pick<OfDouble, false, 2>([](double a, double b) { return a / b; })},
    {"div.approx", pick<OfDouble, false, 2>(rough_quotient)},
    {"rcp.approx", pick<OfDouble, false, 1>([](double a) { return 1 / a; })},
    {"sqrt.approx", pick<OfDouble, false, 1>([](double a) { return std::sqrt(a); })},
    {"rsqrt", pick<OfDouble, false, 1>([](double a) { return 1 / std::sqrt(a); })},
    {"ex2", pick<OfDouble, true, 1>([](double a) { return std::exp2(a); })},
    {"lg2", pick<OfDouble, false, 1>([](double a) { return std::log2(a); })},
    {"sin", pick<OfDouble, false, 1>([](double a) { return std::sin(a); })},
    {"cos", pick<OfDouble, false, 1>([](double a) { return std::cos(a); })},
    {"tanh", pick<OfDouble, true, 1>([](double a) { return std::tanh(a); })},
    {"tanh.f32", pick<OfDouble, false, 1>(rough_tanh)},
    {"min", pick<OfBits, true, 2>(less)},
    {"max", pick<OfBits, true, 2>(larger)},
    {"min.NaN", pick<OfBits, true, 2>(less_or_nan)},
    {"max.NaN", pick<OfBits, true, 2>(larger_or_nan)},
    {"neg", pick<OfBits, true, 1>([](auto f, uint64_t a) { return a ^ f.SIGN; })},
    {"abs", pick<OfBits, true, 1>([](auto f, uint64_t a) { return a & f.MAGNITUDE; })},
    {"copysign", pick<OfBits, false, 2>(sign_and_size)},
    {"setp", pick_comparison<false>},
    {"set", pick_comparison<true>},
    {"testp.finite", test([](auto f, uint64_t a) { return a < f.INFINITY_; })},
    {"testp.infinite", test([](auto f, uint64_t a) { return a == f.INFINITY_; })},
    {"testp.number", test([](auto f, uint64_t a) { return a <= f.INFINITY_; })},
    {"testp.notanumber", test([](auto f, uint64_t a) { return a > f.INFINITY_; })},
    {"testp.subnormal", test([](auto f, uint64_t a) { return a && a < f.NORMAL; })},
    {"testp.normal", test([](auto f, uint64_t a) { return a >= f.NORMAL && a < f.INFINITY_; })},
    {"cvt", pick_cvt},
};

}  // namespace floats
