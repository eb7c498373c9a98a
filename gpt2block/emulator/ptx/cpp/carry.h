// Sums and differences of integers with a carry: add.cc, addc, sub.cc, subc, mad.cc, madc.
#pragma once
#include "alu.h"

namespace carry {

enum { IN = 1, OUT = 2, SUBTRACTS = 4, HIGH = 8 };

template <class T, bool PRODUCT>
void run(Warp& w, const Instr& i, Mask active) {
    using U = alu::Unsigned<T>;
    constexpr int BITS = 8 * sizeof(T);
    const int64_t how = i.form->arg[0];
    const uint64_t *a = w.in(i, 1), *b = w.in(i, 2), *c = w.in(i, PRODUCT ? 3 : 2);
    uint64_t* d = w.out(i, 0);
    Mask carries = 0;
    for_lanes(active, [&](int l) {
        const U first = !PRODUCT ? (U)a[l] : how & HIGH ? (U)alu::high((T)a[l], (T)b[l]) : (U)((U)a[l] * (U)b[l]);
        const alu::u128 second = (alu::u128)(U)c[l] + (how & IN ? w.carry >> l & 1 : 0);
        const alu::u128 sum = how & SUBTRACTS ? first - second : first + second;
        d[l] = (U)sum, carries |= (Mask)(sum >> BITS & 1) << l;
    });
    if (how & OUT) w.carry = (w.carry & ~active) | carries;
}

template <bool PRODUCT>
Handler pick(Form& f) {
    f.arg[0] = (f.name.back() == 'c' ? +IN : 0) | (f.has("cc") ? +OUT : 0) | (f.name[0] == 's' ? +SUBTRACTS : 0) |
               (f.has("hi") ? +HIGH : 0);
    return alu::for_type(f.type(), [](auto zero) -> Handler { return run<decltype(zero), PRODUCT>; });
}

static const Rows rows_{
    {"add.cc sub.cc addc subc", pick<false>},
    {"mad.cc mad.lo.cc mad.hi.cc madc", pick<true>},
};

}  // namespace carry
