// Exchanges of a warp. The scheduler calls these handlers when all lanes of a mask have arrived at the instruction; `active`
// are the lanes of the mask.
#pragma once
#include "machine.h"

#include <algorithm>

namespace warp {

// What a lane receives from a lane that is not in the mask, or that does not exist: NaN, or a large number.
constexpr uint32_t NOBODY = 0x7fedcba9;

enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };

// The lane whose value a lane takes. within: whether this lane is in its segment; if not, it is the lane itself.
inline int source(const Warp& w, const Instr& i, int l, bool& within) {  // operands: a, b, c, membermask
    const int n = w.in(i, i.count - 3)[l] & 31, c = (int)w.in(i, i.count - 2)[l], segment = c >> 8 & 31;
    const int low = l & segment, high = low | (c & 31 & ~segment);
    int j = 0;
    switch (i.form->arg[0]) {
        case UP: j = l - n; break;
        case DOWN: j = l + n; break;
        case BUTTERFLY: j = l ^ n; break;
        default: j = low | (n & ~segment);
    }
    within = i.form->arg[0] == UP ? j >= high : j <= high;
    return within ? j : l;
}

static void shfl(Warp& w, const Instr& i, Mask active) {
    const bool two = i.op[1].kind == Operand::predicate || i.op[1].kind == Operand::none;
    uint64_t a[LANES];
    std::memcpy(a, w.in(i, i.count - 4), sizeof a);
    uint64_t* d = w.out(i, 0);
    Mask valid = 0;
    int from[LANES];
    bool within[LANES];
    for_lanes(active, [&](int l) { from[l] = source(w, i, l, within[l]); });  // before d, which may be one of the operands
    for_lanes(active, [&](int l) {
        valid |= (Mask)within [l] << l;
        d[l] = active >> from[l] & 1 ? (uint32_t)a[from[l]] : NOBODY;
    });
    if (two && i.count == 6) w.set_predicate(i, 1, active, valid);
}

static void vote(Warp& w, const Instr& i, Mask active) {
    const Mask holds = w.predicate(i, 1) & active;
    const bool all = holds == active;
    switch (i.form->arg[0]) {
        case 0: for_lanes(active, [&](int l) { w.out(i, 0)[l] = holds; }); return;
        case 1: w.set_predicate(i, 0, active, all ? ~0u : 0); return;
        case 2: w.set_predicate(i, 0, active, holds ? ~0u : 0); return;
        default: w.set_predicate(i, 0, active, all || !holds ? ~0u : 0);
    }
}

// d, or d and a predicate, then a, membermask.
static void match(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, i.count - 2);
    const uint64_t ones = i.form->type().bits == 64 ? ~0ull : 0xffffffff;
    Mask same[LANES] = {};
    for_lanes(active, [&](int l) {
        for_lanes(active, [&](int k) { same[l] |= (Mask)((a[l] & ones) == (a[k] & ones)) << k; });
    });
    const bool all = i.form->has("all"), agree = same[__builtin_ctz(active)] == active;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = !all ? same[l] : agree ? active : 0; });
    if (i.count == 4) w.set_predicate(i, 1, active, agree ? ~0u : 0);
}

static void redux(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    const Form& f = *i.form;
    const bool sign = f.type().is_signed();
    uint32_t r = (uint32_t)a[__builtin_ctz(active)];
    for_lanes(active & (active - 1), [&](int l) {
        const uint32_t x = (uint32_t)a[l];
        const bool less = sign ? (int32_t)x < (int32_t)r : x < r;
        switch (f.arg[0]) {
            case 0: r += x; break;
            case 1: r = less ? x : r; break;
            case 2: r = less ? r : x; break;
            case 3: r &= x; break;
            case 4: r |= x; break;
            default: r ^= x;
        }
    });
    for_lanes(active, [&](int l) { w.out(i, 0)[l] = r; });
}

static void activemask(Warp& w, const Instr& i, Mask active) {
    for_lanes(active, [&](int l) { w.out(i, 0)[l] = active; });
}

static void nothing(Warp&, const Instr&, Mask) {}

static void nanosleep(Warp& w, const Instr&, Mask) { w.yields = true; }

static int which(const Form& f, std::initializer_list<const char*> words) {
    int k = 0;
    for (const char* word : words) {
        if (f.has(word)) return k;
        ++k;
    }
    return k;
}

static const Register all_[] = {
    {{"shfl"}, [](Form& f) -> Handler { f.arg[0] = which(f, {"up", "down", "bfly"}); f.gathers = LAST; return shfl; }},
    {{"vote"}, [](Form& f) -> Handler { f.arg[0] = which(f, {"ballot", "all", "any"}); f.gathers = LAST; return f.has("sync") ? vote : nullptr; }},
    {{"match"}, [](Form& f) -> Handler { f.gathers = LAST; return match; }},
    {{"redux"}, [](Form& f) -> Handler { f.arg[0] = which(f, {"add", "min", "max", "and", "or"}); f.gathers = LAST; return redux; }},
    {{"activemask"}, [](Form&) -> Handler { return activemask; }},
    {{"nanosleep"}, [](Form&) -> Handler { return nanosleep; }},
    {{"bar", "barrier"}, [](Form& f) -> Handler {
        if (f.has("cluster")) return nullptr;
        if (f.has("warp")) f.gathers = LAST;
        else f.control = Control::barrier;
        return nothing;
    }},
};

}  // namespace warp
