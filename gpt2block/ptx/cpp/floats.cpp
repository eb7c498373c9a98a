// Handlers of floating-point instructions, and of all conversions.
#include "compare.h"
#include "numbers.h"

namespace floats {

using namespace numbers;

inline int64_t packed(Way way) {
    int64_t settings = 0;
    static_assert(sizeof way <= sizeof settings);
    std::memcpy(&settings, static_cast<const void*>(&way), sizeof way);
    return settings;
}
inline Way unpacked(int64_t settings) {
    Way way;
    std::memcpy(static_cast<void*>(&way), &settings, sizeof way);
    return way;
}

inline Way way_of(const Form& f) {
    Way way;
    for (const std::string& word : f.modifiers) {
        if (word.size() >= 2 && word[0] == 'r' && word != "relu") {
            way.integral = word.size() == 3 && word[2] == 'i';
            way.round = word == "rna"     ? Round::away
                        : word[1] == 'z' ? Round::zero
                        : word[1] == 'm' ? Round::down
                        : word[1] == 'p' ? Round::up
                                         : Round::nearest;
        }
    }
    way.ftz = f.has("ftz"), way.sat = f.has("sat"), way.relu = f.has("relu"), way.finite = f.has("satfinite");
    return way;
}

// --- arithmetic

// NEAREST: the way is .rn without .sat or .relu, with .ftz if FTZ; it is then known to the compiler.
template <class Op, class F, int OPERANDS, bool NEAREST, bool FTZ>
static void arithmetic(Warp& w, const Instr& i, Mask active) {
    Way way = unpacked(i.form->arg[0]);
    if (NEAREST) way = Way(), way.ftz = FTZ;
    const uint64_t* a = w.in(i, 1);
    const uint64_t* b = OPERANDS > 1 ? w.in(i, 2) : a;
    const uint64_t* c = OPERANDS > 2 ? w.in(i, 3) : a;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [=](int l) { d[l] = Op::template run<F>(a[l], b[l], c[l], way); });
}

template <class Op, class F>
struct Twice {  // the operation for both halves
    template <class>
    static uint64_t run(uint64_t a, uint64_t b, uint64_t c, Way way) {
        const uint64_t low = Op::template run<F>(a & 0xffff, b & 0xffff, c & 0xffff, way);
        return low | Op::template run<F>(a >> 16, b >> 16, c >> 16, way) << 16;
    }
};

template <class Op, int OPERANDS>
static Handler pick(Form& f) {
    const Way way = way_of(f);
    f.arg[0] = packed(way);
    const Type& type = f.type();
    const bool nearest = way.round == Round::nearest && !way.sat && !way.relu;
    if (type.is("f32")) {
        if (!nearest) return arithmetic<Op, F32, OPERANDS, false, false>;
        return way.ftz ? arithmetic<Op, F32, OPERANDS, true, true> : arithmetic<Op, F32, OPERANDS, true, false>;
    }
    if (type.is("f64")) return arithmetic<Op, F64, OPERANDS, false, false>;
    if (type.is("f16")) return arithmetic<Op, F16, OPERANDS, false, false>;
    if (type.is("bf16")) return arithmetic<Op, BF16, OPERANDS, false, false>;
    if (type.is("f16x2")) return arithmetic<Twice<Op, F16>, F16, OPERANDS, false, false>;
    if (type.is("bf16x2")) return arithmetic<Twice<Op, BF16>, BF16, OPERANDS, false, false>;
    return nullptr;
}

template <bool LARGER, bool NAN_RESULT>
struct Extreme {
    template <class F>
    static uint64_t run(uint64_t a, uint64_t b, uint64_t, Way way) {
        return extreme<F>(a, b, LARGER, NAN_RESULT, way.ftz);
    }
};
template <bool NEGATES>
struct Sign {
    template <class F>
    static uint64_t run(uint64_t a, uint64_t, uint64_t, Way way) {
        if (way.ftz) a = F::flushed(a);
        return NEGATES ? a ^ F::SIGN : a & F::MAGNITUDE;
    }
};
struct CopySign {
    template <class F>
    static uint64_t run(uint64_t a, uint64_t b, uint64_t, Way) {
        return (a & F::SIGN) | (b & F::MAGNITUDE);
    }
};

static Handler pick_division(Form& f) {
    if (f.has("approx")) return pick<DivApprox, 2>(f);
    return f.has("full") ? pick<DivFull, 2>(f) : pick<Div, 2>(f);
}

// --- comparisons

template <class F>
static Mask compared(const uint64_t* a, const uint64_t* b, Mask active, unsigned accepts, bool ftz, int shift = 0) {
    Mask holds = 0;
    for_lanes(active, [&](int l) {
        holds |= (Mask)((relation<F>(a[l] >> shift, b[l] >> shift, ftz) & accepts) != 0) << l;
    });
    return holds;
}

// Operands: p, or p and q, then a, b, and perhaps a predicate to join with.
template <class F, bool TWO>
static void setp(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const int a = i.count - (arg[2] == ALONE ? 2 : 3);
    const Mask other = arg[2] == ALONE ? 0 : w.predicate(i, a + 2);
    const auto half = [&](int shift) {
        return compared<F>(w.in(i, a), w.in(i, a + 1), active, (unsigned)arg[0], arg[1], shift);
    };
    const Mask low = half(0), high = TWO ? half(16) : ~low;
    w.set_predicate(i, 0, active, join((int)arg[2], low, other));
    if (a == 2) w.set_predicate(i, 1, active, join((int)arg[2], high, other));
}

template <class F, bool TWO>
static void set(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const Mask other = arg[2] == ALONE ? 0 : w.predicate(i, 3);
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2);
    const Mask low = join((int)arg[2], compared<F>(a, b, active, (unsigned)arg[0], arg[1]), other);
    Mask high = 0;
    if (TWO) high = join((int)arg[2], compared<F>(a, b, active, (unsigned)arg[0], arg[1], 16), other);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) {
        d[l] = (low >> l & 1 ? arg[3] & (TWO ? 0xffff : 0xffffffff) : 0) | (high >> l & 1 ? arg[3] << 16 : 0);
    });
}

template <bool SET>
static Handler pick_comparison(Form& f) {
    const Type& type = f.type(SET ? 1 : 0);
    f.arg[0] = accepted(f), f.arg[1] = f.has("ftz"), f.arg[2] = joined(f);
    if (f.arg[0] == 0) return nullptr;
    if (SET) {
        const Type& result = f.type();
        f.arg[3] = result.is("f32")                         ? F32::ONE
                   : result.is("f16") || result.is("f16x2") ? F16::ONE
                   : result.kind == 'f'                     ? BF16::ONE
                   : result.bits == 16                      ? 0xffff
                                                            : 0xffffffff;
    }
#define COMPARISON(NAME, F, TWO) \
    if (type.is(NAME)) return SET ? set<F, TWO> : setp<F, TWO>;
    COMPARISON("f32", F32, false)
    COMPARISON("f64", F64, false)
    COMPARISON("f16", F16, false)
    COMPARISON("bf16", BF16, false)
    COMPARISON("f16x2", F16, true)
    COMPARISON("bf16x2", BF16, true)
#undef COMPARISON
    return nullptr;
}

template <class F>
static void testp(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    const std::string& word = i.form->modifiers[0];
    Mask holds = 0;
    for_lanes(active, [&](int l) {
        const uint64_t size = a[l] & F::MAGNITUDE;
        const bool nan = F::is_nan(size), infinite = size == F::INFINITY_, small = size < F::NORMAL && size;
        const bool found = word == "finite"        ? !nan && !infinite
                           : word == "infinite"    ? infinite
                           : word == "number"      ? !nan
                           : word == "notanumber"  ? nan
                           : word == "subnormal"   ? small
                                                   : !nan && !infinite && size >= F::NORMAL;
        holds |= (Mask)found << l;
    });
    w.set_predicate(i, 0, active, holds);
}

// --- conversions

using Conversion = uint64_t (*)(uint64_t from, const int64_t* arg);

// From integers: the width and sign are settings, so that one function serves all types.
struct Integer {
    unsigned width;
    bool is_signed;
    uint64_t extended(uint64_t x) const {
        const int unused = 64 - (int)width;
        return is_signed ? (uint64_t)((int64_t)(x << unused) >> unused) : x << unused >> unused;
    }
};
inline Integer integer(int64_t setting) { return {(unsigned)(setting & 127), setting > 127}; }
inline int64_t setting(const Type& type) { return type.bits + (type.is_signed() ? 128 : 0); }

// arg: the way, the type of the result, the type of the operand.
template <class From>
static uint64_t float_to_integer(uint64_t x, const int64_t* arg) {
    const Way way = unpacked(arg[0]);
    const Integer to = integer(arg[1]);
    return to_integer(value<From>(x, way.ftz && From::BITS == 32), way.round, to.width, to.is_signed, From::BITS == 64);
}
template <class To>
static uint64_t integer_to_float(uint64_t x, const int64_t* arg) {
    const Integer from = integer(arg[2]);
    return from_integer<To>(from.extended(x), from.is_signed, unpacked(arg[0]));
}
static uint64_t integer_to_integer(uint64_t x, const int64_t* arg) {
    const Integer to = integer(arg[1]), from = integer(arg[2]);
    x = from.extended(x);
    if (unpacked(arg[0]).sat) {
        const uint64_t most = ~0ull >> (64 - to.width + to.is_signed);
        const bool negative = from.is_signed && (int64_t)x < 0;
        if (!negative && x > most) x = most;
        if (negative && (!to.is_signed || (int64_t)x < -(int64_t)most - 1)) x = to.is_signed ? ~most : 0;
    }
    return to.extended(x);
}
template <class To, class From>
static uint64_t float_to_float(uint64_t x, const int64_t* arg) {
    return convert<To, From>(x, unpacked(arg[0])) << (std::is_same_v<To, TF32> ? 13 : 0);
}

// Calls make(format) with the format of a type, as an object. Returns null for other types.
template <class Make>
static Conversion with_format(const std::string& name, Make make) {
    if (name == "f32") return make(F32());
    if (name == "f64") return make(F64());
    if (name == "f16") return make(F16());
    if (name == "bf16") return make(BF16());
    return nullptr;
}

static Conversion conversion(const std::string& to, const std::string& from) {
    const bool of_float = type_named(from).kind == 'f', to_float = type_named(to).kind == 'f';
    if (!of_float && !to_float) return integer_to_integer;
    if (!of_float) return with_format(to, [](auto t) -> Conversion { return integer_to_float<decltype(t)>; });
    if (!to_float) return with_format(from, [](auto f) -> Conversion { return float_to_integer<decltype(f)>; });
#define CONVERSION(TO, T, FROM, F) \
    if (to == TO && from == FROM) return float_to_float<T, F>;
    CONVERSION("tf32", TF32, "f32", F32)
    CONVERSION("e4m3", E4M3, "f32", F32)
    CONVERSION("e5m2", E5M2, "f32", F32)
    CONVERSION("e4m3", E4M3, "f16", F16)
    CONVERSION("e5m2", E5M2, "f16", F16)
    CONVERSION("f16", F16, "e4m3", E4M3)
    CONVERSION("f16", F16, "e5m2", E5M2)
#undef CONVERSION
    return with_format(to, [&](auto t) -> Conversion {
        return with_format(from, [](auto f) -> Conversion { return float_to_float<decltype(t), decltype(f)>; });
    });
}

static void cvt(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const Conversion convert = reinterpret_cast<Conversion>(arg[3]);
    const uint64_t* a = w.in(i, 1);
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [=](int l) { d[l] = convert(a[l], arg); });
}

// d = {a, b}: the first operand becomes the upper half. Or d = {upper half, lower half} of the only operand.
static void cvt_pair(Warp& w, const Instr& i, Mask active) {
    const int64_t* arg = i.form->arg;
    const Conversion convert = reinterpret_cast<Conversion>(arg[3]);
    const bool packs = i.count > 2;
    const int to = (int)arg[1], from = (int)arg[2];  // bits of a half
    const uint64_t *a = w.in(i, 1), *b = packs ? w.in(i, 2) : a;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [=](int l) {
        const uint64_t mask = (1ull << from) - 1, high = packs ? a[l] : a[l] >> from;
        d[l] = convert(high & mask, arg) << to | convert(b[l] & mask, arg);
    });
}

static Handler pick_cvt(Form& f) {
    if (f.types.size() != 2) return nullptr;
    Type to = f.type(0), from = f.type(1);
    const auto one = [](Type& type) {
        const std::size_t length = type.name.size();
        if (length < 3 || type.name.compare(length - 2, 2, "x2")) return false;
        type = type_named(type.name.substr(0, length - 2));
        return true;
    };
    const bool pair = one(to), of_pair = one(from);
    if (of_pair && !pair) return nullptr;
    Way way = way_of(f);
    if (to.bits == 8 && to.kind == 'f') way.finite = true;
    f.arg[0] = packed(way);
    f.arg[1] = pair ? to.bits : setting(to);
    f.arg[2] = pair ? from.bits : setting(from);
    f.arg[3] = reinterpret_cast<int64_t>(conversion(to.name, from.name));
    return f.arg[3] == 0 ? nullptr : pair ? cvt_pair : cvt;
}

}  // namespace floats

// Returns the handler of an instruction with operands of a floating-point type, or null.
Handler pick_float(Form& f) {
    using namespace floats;
    static const std::unordered_map<std::string, Pick> all = {
        {"add", pick<Add, 2>},
        {"sub", pick<Sub, 2>},
        {"mul", pick<Mul, 2>},
        {"fma", pick<Fma, 3>},
        {"mad", pick<Fma, 3>},
        {"div", pick_division},
        {"rcp", [](Form& f) { return f.has("approx") ? pick<RcpApprox, 1>(f) : pick<Rcp, 1>(f); }},
        {"sqrt", [](Form& f) { return f.has("approx") ? pick<SqrtApprox, 1>(f) : pick<Sqrt, 1>(f); }},
        {"rsqrt", pick<Rsqrt, 1>},
        {"ex2", pick<Ex2, 1>},
        {"lg2", pick<Lg2, 1>},
        {"sin", pick<Sin, 1>},
        {"cos", pick<Cos, 1>},
        {"tanh", pick<Tanh, 1>},
        {"min", [](Form& f) { return f.has("NaN") ? pick<Extreme<false, true>, 2>(f) : pick<Extreme<false, false>, 2>(f); }},
        {"max", [](Form& f) { return f.has("NaN") ? pick<Extreme<true, true>, 2>(f) : pick<Extreme<true, false>, 2>(f); }},
        {"neg", pick<Sign<true>, 1>},
        {"abs", pick<Sign<false>, 1>},
        {"copysign", pick<CopySign, 2>},
        {"setp", pick_comparison<false>},
        {"set", pick_comparison<true>},
        {"testp", [](Form& f) -> Handler { return f.type().bits == 64 ? testp<F64> : testp<F32>; }},
        {"cvt", pick_cvt},
    };
    const auto found = all.find(f.name);
    return found == all.end() ? nullptr : found->second(f);
}

static const Register floats_{
    {"fma", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign", "testp", "cvt"}, pick_float};
