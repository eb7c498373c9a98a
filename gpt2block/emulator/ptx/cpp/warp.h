// Exchanges of a warp. The scheduler calls these handlers when all lanes of a mask have arrived at the instruction;
// `active` are the lanes of the mask.
#pragma once
#include "alu.h"

namespace warp {

enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };

// The lane whose value a lane takes. within: whether this lane is in its segment; if not, it is the lane itself.
inline int source(const Warp& w, const Instr& i, int l, bool& within) {  // operands: a, b, c, membermask
    const int n = w.in(i, i.count - 3)[l] & 31, c = (int)w.in(i, i.count - 2)[l], segment = c >> 8 & 31;
    const int low = l & segment, high = low | (c & 31 & ~segment);
    const int64_t way = i.form->arg[0];
    const int j = way == UP ? l - n : way == DOWN ? l + n : way == BUTTERFLY ? l ^ n : low | (n & ~segment);
    within = way == UP ? j >= high : j <= high;
    return within ? j : l;
}

static void shfl(Warp& w, const Instr& i, Mask active) {
    uint64_t a[LANES];
    std::copy_n(w.in(i, i.count - 4), LANES, a);
    uint64_t* d = w.out(i, 0);
    const uint32_t nobody = w.machine.fill() * 0x01010101u;  // from a lane outside the mask: it differs between orders
    Mask valid = 0;
    for_lanes(active, [&](int l) {
        bool within;
        const int from = source(w, i, l, within);
        valid |= (Mask)within << l;
        d[l] = active >> from & 1 ? (uint32_t)a[from] : nobody;
    });
    if (i.count == 6) w.set_predicate(i, 1, active, valid);
}
template <Shuffle WAY>
Handler pick_shfl(Form& f) {
    f.arg[0] = WAY;
    return shfl;
}

// A predicate from the lanes where another one holds.
template <class Vote>
constexpr Handler vote(Vote) {
    return [](Warp& w, const Instr& i, Mask active) {
        w.set_predicate(i, 0, active, Vote()(w.predicate(i, 1) & active, active) ? ~0u : 0);
    };
}

static void all_lanes(Warp& w, const Instr& i, Mask active, uint64_t value) {
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [=](int l) { d[l] = value; });
}

static void ballot(Warp& w, const Instr& i, Mask active) { all_lanes(w, i, active, w.predicate(i, 1) & active); }
static void activemask(Warp& w, const Instr& i, Mask active) { all_lanes(w, i, active, active); }

// d, perhaps with a predicate, a, membermask.
static void match(Warp& w, const Instr& i, Mask active) {
    const uint64_t *a = w.in(i, i.count - 2), ones = alu::ones_of(i.form->type());
    Mask same[LANES] = {};
    for_lanes(active, [&](int l) {
        same[l] = lanes_where(active, [&](int k) { return (a[l] & ones) == (a[k] & ones); });
    });
    const bool all = i.form->has("all"), agree = same[__builtin_ctz(active)] == active;
    uint64_t* d = w.out(i, 0);
    for_lanes(active, [&](int l) { d[l] = !all ? same[l] : agree ? active : 0; });
    if (i.count == 4) w.set_predicate(i, 1, active, agree ? ~0u : 0);
}

template <class T, class F>
static void reduce(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    T result = (T)a[__builtin_ctz(active)];
    for_lanes(active & (active - 1), [&](int l) { result = F()(result, (T)a[l]); });
    all_lanes(w, i, active, (alu::Unsigned<T>)result);
}
template <class F>
constexpr Pick redux(F) {
    return [](Form& f) {
        return alu::for_type<true, 32>(f.type(), [](auto t) -> Handler { return reduce<decltype(t), F>; });
    };
}

static void nanosleep(Warp& w, const Instr&, Mask) { w.yields = true; }

static const Rows rows_{
    {"shfl.up", pick_shfl<UP>, LAST},
    {"shfl.down", pick_shfl<DOWN>, LAST},
    {"shfl.bfly", pick_shfl<BUTTERFLY>, LAST},
    {"shfl.idx", pick_shfl<INDEX>, LAST},
    {"vote.sync.ballot", ballot, LAST},
    {"vote.sync.all", vote([](Mask holds, Mask active) { return holds == active; }), LAST},
    {"vote.sync.any", vote([](Mask holds, Mask) { return holds != 0; }), LAST},
    {"vote.sync.uni", vote([](Mask holds, Mask active) { return !holds || holds == active; }), LAST},
    {"match", match, LAST},
    {"redux.add", redux(alu::sum), LAST},
    {"redux.min", redux(alu::smaller), LAST},
    {"redux.max", redux(alu::larger), LAST},
    {"redux.and", redux([](auto a, auto b) { return a & b; }), LAST},
    {"redux.or", redux([](auto a, auto b) { return a | b; }), LAST},
    {"redux.xor", redux([](auto a, auto b) { return a ^ b; }), LAST},
    {"activemask", activemask},
    {"nanosleep", nanosleep},
    {"bar barrier", Control::barrier},
    {"bar.warp", nothing, LAST},
};

}  // namespace warp
