// setp and set, for integers and for floating-point numbers.
#pragma once
#include "machine.h"

namespace compare {

enum Setting { ACCEPTED, JOIN, TRUTH, PAIRS };  // of f.arg: see prepare()
enum Join { ALONE, AND, OR, XOR };              // with a predicate

// Returns the relations for which a comparison holds, as bits: less 1, equal 2, greater 4, unordered 8.
inline int accepted(const Form& f) {
    static const std::unordered_map<std::string, int> all = {
        {"eq", 2}, {"ne", 5}, {"lt", 1}, {"le", 3}, {"gt", 4}, {"ge", 6}, {"num", 7}, {"lo", 1}, {"ls", 3}, {"hi", 4},
        {"hs", 6}, {"equ", 10}, {"neu", 13}, {"ltu", 9}, {"leu", 11}, {"gtu", 12}, {"geu", 14}, {"nan", 8}};
    for (const std::string& word : f.words) {
        if (all.count(word)) return all.at(word);
    }
    return 0;
}

inline bool prepare(Form& f) {
    using namespace numbers;
    const Type& result = f.type();
    const bool half = result.is("f16") || result.is("f16x2");
    f.arg[ACCEPTED] = accepted(f);
    f.arg[JOIN] = f.has("and") ? AND : f.has("or") ? OR : f.has("xor") ? XOR : ALONE;
    f.arg[TRUTH] = result.kind != 'f' ? ~0u : result.is("f32") ? F32::ONE : half ? F16::ONE : BF16::ONE;
    f.arg[PAIRS] = f.types.back().name.find("x2") != std::string::npos;
    return f.arg[ACCEPTED];
}

inline Mask joined(const Warp& w, const Instr& i, Mask found) {
    const int64_t how = i.form->arg[JOIN];
    if (how == ALONE) return found;
    const Mask other = w.predicate(i, i.count - 1);
    return how == AND ? found & other : how == OR ? found | other : found ^ other;
}

template <class Relation>
Mask holds(const Warp& w, const Instr& i, int k, Mask active, int shift) {
    const uint64_t *a = w.in(i, k), *b = w.in(i, k + 1);
    const unsigned accepts = (unsigned)i.form->arg[ACCEPTED];
    const bool ftz = i.form->way.ftz;
    return lanes_where(active, [=](int l) { return Relation::of(a[l] >> shift, b[l] >> shift, ftz) & accepts; });
}

// Operands: p, or p and q, then a, b, and perhaps a predicate to join with. q: of the upper halves, or the opposite.
template <class Relation>
void setp(Warp& w, const Instr& i, Mask active) {
    const int k = i.count - 2 - (i.form->arg[JOIN] != ALONE);
    const Mask low = holds<Relation>(w, i, k, active, 0);
    const Mask high = i.form->arg[PAIRS] ? holds<Relation>(w, i, k, active, 16) : ~low;
    const Mask p = joined(w, i, low), q = joined(w, i, high);
    w.set_predicate(i, 0, active, p);
    if (k == 2) w.set_predicate(i, 1, active, q);
}

template <class Relation>
void set(Warp& w, const Instr& i, Mask active) {
    const bool pairs = i.form->arg[PAIRS];
    const uint64_t ones = i.form->type().bits == 16 || pairs ? 0xffff : 0xffffffff, truth = i.form->arg[TRUTH] & ones;
    const Mask low = joined(w, i, holds<Relation>(w, i, 1, active, 0));
    const Mask high = pairs ? joined(w, i, holds<Relation>(w, i, 1, active, 16)) : 0;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = (low >> l & 1 ? truth : 0) | (high >> l & 1 ? truth << 16 : 0); });
}

}  // namespace compare
