// Memory: finds the bytes at an address; checks bounds, alignment, unwritten bytes; loads, stores, atomic operations.
#pragma once
#include "alu.h"
#include "races.h"

namespace memory {

constexpr uint8_t GAP = 2;  // in place of 0 or 1, whether a byte was written: it is between variables

struct Region {  // an array, or what belongs to a block or a thread; nothing unless an address leads to it
    uint8_t *data = nullptr, *written = nullptr;  // of the first byte
    uint64_t bytes = 0, origin = 0;               // origin: generic address of the first byte
    int array = Finding::nowhere;
    Shadow* shadow = nullptr;
    bool constant = false;
    uint64_t room = 0;  // where further accesses of the same size and use may begin without another look

    bool holds(uint64_t from, uint64_t count) const { return from <= bytes && count <= bytes - from; }
};

// Addresses in shared and local memory have 32 bits.
inline uint64_t generic_address(const Warp& w, int lane, uint64_t address, Space space) {
    const int64_t narrow = (int32_t)address;
    if (space == Space::shared || space == Space::cluster) return SHARED_WINDOW + narrow;
    if (space == Space::local) return LOCAL_WINDOW + ((uint64_t)w.thread(lane) << RANK_SHIFT) + narrow;
    return space == Space::param ? PARAM_WINDOW + address : address;
}

inline void generic_addresses(const Warp& w, const Instr& i, int k, Mask active, uint64_t* to) {
    const uint64_t* base = w.in(i, k);
    const int64_t offset = i.op[k].offset;
    const Space space = i.form->space;
    if (space == Space::shared) for_lanes(active, [=](int l) { to[l] = SHARED_WINDOW + (int32_t)(base[l] + offset); });
    else if (space == Space::global) for_lanes(active, [=](int l) { to[l] = base[l] + offset; });
    else for_lanes(active, [&](int l) { to[l] = generic_address(w, l, base[l] + offset, space); });
}

inline Region shared_at(Block& block, uint64_t address) {
    const uint64_t rank = (address - SHARED_WINDOW) >> RANK_SHIFT;
    const bool ranked = rank && rank <= block.cluster.size();
    Block& owner = ranked ? *block.cluster[rank - 1] : block;
    const uint64_t origin = SHARED_WINDOW + (ranked ? rank << RANK_SHIFT : 0);
    std::vector<uint8_t>& bytes = owner.shared;
    return {bytes.data(), owner.written.data(), bytes.size(), origin, Finding::in_shared, owner.shadow.get()};
}

inline Region local_at(Warp& w, const Instr& i, int lane, uint64_t address, bool generic) {
    const uint64_t owner = generic ? (address - LOCAL_WINDOW) >> RANK_SHIFT : (uint64_t)w.thread(lane);
    if (owner != (uint64_t)w.thread(lane)) {
        throw Finding{.kind = "race", .text = "a local variable of another thread", .now = w.here(i, lane),
                      .other = {w.block.number, (int64_t)owner, -1}, .verb = "touches", .array = Finding::in_local};
    }
    const uint64_t bytes = w.machine.program->local_bytes, start = bytes * owner;
    const uint64_t origin = LOCAL_WINDOW + (owner << RANK_SHIFT);
    return {w.block.local.data() + start, w.block.local_written.data() + start, bytes, origin, Finding::in_local};
}

// Returns the region of a generic address that an instruction uses in a space.
inline Region find(Warp& w, const Instr& i, int lane, uint64_t address, Space space) {
    Machine& m = w.machine;
    const uint64_t tag = address >> ARRAY_SHIFT;
    const auto in = [&](Space one, uint64_t window) {
        return space == one || (space == Space::generic && tag == window >> ARRAY_SHIFT);
    };
    if (in(Space::shared, SHARED_WINDOW) || space == Space::cluster) return shared_at(w.block, address);
    if (in(Space::local, LOCAL_WINDOW)) return local_at(w, i, lane, address, space == Space::generic);
    if (tag == PARAM_WINDOW >> ARRAY_SHIFT) {
        return {m.params, nullptr, (uint64_t)m.param_bytes, PARAM_WINDOW, Finding::in_params, nullptr, true};
    }
    const uint64_t number = tag - FIRST_ARRAY;
    if (number >= m.arrays.size()) return {};
    const Array& a = m.arrays[number];
    return {a.data, a.written, a.bytes, a.origin, (int)number, a.shadow.get(), (bool)a.constant};
}

[[gnu::cold]] inline Finding misuse(Warp& w, const Instr& i, int lane, const Region& region, uint64_t from,
                                    unsigned bytes, unsigned use, const char* kind, const uint8_t* data = nullptr) {
    Trace* trace = w.machine.trace.get();
    if (trace && !(data && region.shadow)) trace->access(w, i, lane, region.array, (int64_t)from, bytes, use, data);
    return {.kind = kind, .now = w.here(i, lane), .verb = Races::is(use), .array = region.array,
            .byte = (int64_t)from, .bytes = bytes};
}

// Returns the region of a generic address, which a lane may access there.
inline Region enter(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space, unsigned use) {
    Region region = find(w, i, lane, address, space);
    const uint64_t from = address - region.origin;
    if (!region.holds(from, bytes)) throw misuse(w, i, lane, region, from, bytes, use, "out of bounds");
    if (region.constant && use & WRITES) throw misuse(w, i, lane, region, from, bytes, use, "constant");
    const uint8_t* early = w.machine.early;
    if (early && region.array >= 0 && !early[region.array] && !(w.waited >> lane & 1)) {
        throw misuse(w, i, lane, region, from, bytes, use, "before the wait");
    }
    const bool of_lane = early || region.array == Finding::in_local;
    region.room = of_lane ? 0 : region.bytes - bytes + 1;
    return region;
}

// Returns whether all bytes were written and none is between variables, as is usual.
inline bool all_written(const uint8_t* written, unsigned bytes) {
    constexpr uint64_t ONES = 0x0101010101010101;
    const auto same = [&](auto ones) { return std::memcmp(written, &ones, sizeof ones) == 0; };
    return bytes == 4 ? same((uint32_t)ONES) : bytes == 2 ? same((uint16_t)ONES) : bytes == 8 ? same(ONES)
           : bytes == 1 ? *written == 1 : bytes == 16 && same(ONES) && std::memcmp(written + 8, written, 8) == 0;
}

// Checks alignment, unwritten bytes and races of an access within its region.
[[gnu::always_inline]] inline void check(Warp& w, const Instr& i, int lane, const Region& region, uint64_t from,
                                         unsigned bytes, unsigned use, unsigned align) {
    if (from & (align - 1)) throw misuse(w, i, lane, region, from, bytes, use, "misaligned");
    if (!w.machine.checks || !bytes) return;
    if (region.written && !(use & UNWRITTEN) && !all_written(region.written + from, bytes)) {
        uint8_t* written = region.written + from;
        const bool between = (written[0] | written[bytes - 1]) & GAP;
        if (between) throw misuse(w, i, lane, region, from, bytes, use, "out of bounds");
        // Copies of structures read the padding of local variables, and a byte of empty ones.
        const bool padded = region.array == Finding::in_local && (bytes == 1 || std::memchr(written, 1, bytes));
        const bool unwritten = use & READS && !padded && std::memchr(written, 0, bytes);
        // A sum in a variable is not read: the variable stays as an earlier launch has left it.
        const bool sums = unwritten && use & RESULTLESS && (uint32_t)region.array < w.machine.variables;
        if (unwritten && !sums && !w.machine.noted("unwritten", region.array)) {
            w.machine.note(misuse(w, i, lane, region, from, bytes, use, "unwritten", region.data + from));
        }
        if (use & WRITES && !sums) std::memset(written, 1, bytes);
    }
    if (region.shadow) w.machine.races->record(w, i, lane, *region.shadow, from, bytes, use, region.data + from);
}

// Returns the host address of the bytes at a generic address, after all checks. near: the region of the last access,
// which often contains the bytes, too.
[[gnu::always_inline]] inline uint8_t* touch(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes,
                                             Space space, unsigned use, unsigned align, Region& near) {
    // Made in place: a wide copy of members that were just written one by one would wait for them.
    if (address - near.origin >= near.room) new (&near) Region(enter(w, i, lane, address, bytes, space, use));
    const uint64_t from = address - near.origin;
    if (w.machine.checks || from & (align - 1)) check(w, i, lane, near, from, bytes, use, align);
    return near.data + from;
}

// Does the same as touch for an access that is not followed by similar ones.
inline uint8_t* touch_once(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space,
                           unsigned use, unsigned align) {
    address = generic_address(w, lane, address, space);
    const Region region = enter(w, i, lane, address, bytes, space, use);
    const uint64_t from = address - region.origin;
    if (w.machine.checks || from & (align - 1)) check(w, i, lane, region, from, bytes, use, align);
    return region.data + from;
}

// --- loads and stores

enum Setting { USE, CHANGE, RELEASES };  // of f.arg
enum Released { TO_NOBODY, TO_BLOCK, TO_ALL };

inline void prepare(Form& f, unsigned use) {
    const bool releases = f.has("release") || f.has("acq_rel");
    const bool strong = releases || f.has("relaxed") || f.has("volatile") || f.has("acquire") || use & ATOMIC;
    f.arg[USE] = use | (strong ? +STRONG : 0) | (f.has("nc") ? +READ_ONLY : 0);
    f.arg[RELEASES] = !releases ? TO_NOBODY : f.has("cta") ? TO_BLOCK : TO_ALL;
}

// Record what a strong access releases before it, and acquires after it.
inline void before(Warp& w, const Form& f, Mask active) {
    if (f.arg[RELEASES] && w.machine.races) w.machine.races->fence(w, active, f.arg[RELEASES] == TO_ALL);
}
inline void after(Warp& w, const Form& f, int lane, uint64_t address) {
    const unsigned use = (unsigned)f.arg[USE];
    if (!(use & STRONG) || !w.machine.races) return;
    if (use & READS) w.machine.races->learn(w, lane, address);
    if (use & WRITES) w.machine.races->tell(w, lane, address, !(use & ATOMIC));
}

// Computes the host addresses that the lanes of a load or a store access.
inline void locate(Warp& w, const Instr& i, Mask active, const uint64_t* address, unsigned bytes, uint8_t** at) {
    const Space space = i.form->space;
    const unsigned use = (unsigned)i.form->arg[USE];
    Region near;
    for (Mask rest = active; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        at[l] = touch(w, i, l, address[l], bytes, space, use, bytes, near);
    }
}

template <class T, bool STORE>
void move(Warp& w, const Instr& i, Mask active) {
    const Form& f = *i.form;
    const int value = STORE ? 1 : 0, where = STORE ? 0 : 1, count = i.op[value].count;
    uint64_t address[LANES];
    uint8_t* at[LANES];
    before(w, f, active);
    generic_addresses(w, i, where, active, address);
    locate(w, i, active, address, sizeof(T) * count, at);
    for (int k = 0; k < count; ++k) {
        if constexpr (STORE) {
            const uint64_t* a = w.in(i, value, k);
            for_lanes(active, [&](int l) { std::memcpy(at[l] + k * sizeof(T), a + l, sizeof(T)); });
        } else {
            uint64_t* d = w.out(i, value, k);
            for_lanes(active, [&](int l) {
                T bits;
                std::memcpy(&bits, at[l] + k * sizeof(T), sizeof bits);
                d[l] = (uint64_t)(int64_t)bits;
            });
        }
    }
    if (f.arg[USE] & STRONG) for_lanes(active, [&](int l) { after(w, f, l, address[l]); });
}

template <bool STORE>
Handler pick_move(Form& f) {
    prepare(f, STORE ? WRITES : READS);
    if (f.type().bits == 128) return move<uint64_t, STORE>;  // a .b128 is a vector of two
    const Type bits = {f.type().kind == 's' ? 's' : 'u', f.type().bits, ""};
    return alu::for_type<!STORE, 8>(bits, [](auto zero) -> Handler { return move<decltype(zero), STORE>; });
}

// --- atomic operations, one lane after the other

using Change = uint64_t (*)(uint64_t old, uint64_t b, uint64_t c);

// Records the value that an atom.cas expects.
inline void expect(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, uint64_t value) {
    const Region region = find(w, i, lane, address, i.form->space);
    const uint64_t from = address - region.origin;
    if (!region.shadow || !region.holds(from, bytes)) return;
    w.machine.races->compared(w, lane, *region.shadow, from, bytes, value);
}

static void atom(Warp& w, const Instr& i, Mask active) {
    Machine& m = w.machine;
    const Form& f = *i.form;
    const bool compares = f.has("cas"), result = f.name == "atom" && i.op[0].kind != Operand::none;
    const unsigned use = (unsigned)f.arg[USE] | (result ? 0 : +RESULTLESS);
    const int where = f.name == "atom" ? 1 : 0, count = i.op[where + 1].count;
    const unsigned bytes = f.type().bits / 8;
    const Change change = (Change)f.arg[CHANGE];
    Region near;
    before(w, f, active);
    for (Mask rest = active; rest;) {
        const int l = m.order == Order::reverse ? 31 - __builtin_clz(rest) : __builtin_ctz(rest);
        rest &= ~(1u << l);
        const uint64_t address = generic_address(w, l, w.address(i, where, l), f.space);
        if (compares && m.races) expect(w, i, l, address, bytes, w.in(i, where + 1)[l]);
        uint8_t* at = touch(w, i, l, address, bytes * count, f.space, use, bytes * count, near);
        for (int k = 0; k < count; ++k, at += bytes) {
            uint64_t old = 0;
            std::memcpy(&old, at, bytes);
            const uint64_t made = change(old, w.in(i, where + 1, k)[l], compares ? w.in(i, where + 2)[l] : 0);
            std::memcpy(at, &made, bytes);
            if (result) w.out(i, 0, k)[l] = old;
        }
        after(w, f, l, address);
    }
    if (compares) w.yields = true;  // a loop around it may wait for another thread
}

inline Handler pick_atom(Form& f, Change change) {
    prepare(f, READS | WRITES | ATOMIC);
    f.arg[CHANGE] = reinterpret_cast<int64_t>(change);
    return change ? atom : nullptr;
}

template <class T, class F>
uint64_t changed(uint64_t old, uint64_t b, uint64_t c) {
    if constexpr (arity<F, T>() == 3) return (alu::Unsigned<T>)F()((T)old, (T)b, (T)c);
    else return (alu::Unsigned<T>)F()((T)old, (T)b);
}
template <class F>
constexpr Pick changes(F) {
    return [](Form& f) {
        return pick_atom(f, alu::for_type(f.type(), [](auto t) -> Change { return changed<decltype(t), F>; }));
    };
}

// Sums of floating-point elements. Sums of pairs are two sums.
template <class F, bool FTZ>
uint64_t add_floats(uint64_t a, uint64_t b, uint64_t) {
    using namespace numbers;
    if (FTZ) a = F::flushed(a), b = F::flushed(b);
    return finish<F>(host<F>(a) + host<F>(b), Way{.ftz = FTZ});
}
template <class F>
uint64_t add_pairs(uint64_t a, uint64_t b, uint64_t) {
    return add_floats<F, false>(a & 0xffff, b & 0xffff, 0) | add_floats<F, false>(a >> 16, b >> 16, 0) << 16;
}
// Outside of shared memory, subnormal numbers of f32 are flushed to zero.
static Handler add_f32(Form& f) {
    using numbers::F32;
    return pick_atom(f, f.space == Space::shared ? add_floats<F32, false> : add_floats<F32, true>);
}
template <Change CHANGE_>
Handler adds(Form& f) {
    return pick_atom(f, CHANGE_);
}

// --- addresses and fences

static void cvta(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    uint64_t* d = w.out(i, 0);
    const Space space = i.form->space;
    const uint64_t low = (1ull << (space == Space::local ? RANK_SHIFT : 32)) - 1;
    const bool window = space != Space::global && space != Space::constant, to = i.form->has("to");
    for_lanes(active, [&](int l) { d[l] = !window ? a[l] : to ? a[l] & low : generic_address(w, l, a[l], space); });
}

static void isspacep(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    const auto inside = [&](int l) {
        const uint64_t tag = a[l] >> ARRAY_SHIFT;
        const bool array = tag >= FIRST_ARRAY, shared = tag == 1, local = tag == 2, param = tag == 3;
        const bool of_windows[] = {false, array, shared, local, param, array, shared};
        return of_windows[(int)i.form->space];
    };
    w.set_predicate(i, 0, active, lanes_where(active, inside));
}

static void fence(Warp& w, const Instr& i, Mask active) {
    const bool of_device = !i.form->has("cta");
    if (w.machine.trace) w.machine.trace->each(w, i, active, of_device ? "__threadfence()" : "__threadfence_block()");
    if (w.machine.races) w.machine.races->fence(w, active, of_device);
}

static const Rows rows_{
    {"ld ldu", pick_move<false>},
    {"st", pick_move<true>},
    {"red", [](Form& f) { return find_handler(f, "atom") ? f.run : nullptr; }},
    {"atom.cas", changes([](auto a, auto b, auto c) { return a == b ? c : a; })},
    {"atom.exch", changes([](auto, auto b) { return b; })},
    {"atom.add", changes(alu::sum)},
    {"atom.min", changes(alu::smaller)},
    {"atom.max", changes(alu::larger)},
    {"atom.and", changes([](auto a, auto b) { return a & b; })},
    {"atom.or", changes([](auto a, auto b) { return a | b; })},
    {"atom.xor", changes([](auto a, auto b) { return a ^ b; })},
    {"atom.inc", changes([](auto a, auto b) { return a >= b ? 0 : a + 1; })},
    {"atom.dec", changes([](auto a, auto b) { return a == 0 || a > b ? b : a - 1; })},
    {"atom.add.f32", add_f32},
    {"atom.add.f64", adds<add_floats<numbers::F64, false>>},
    {"atom.add.f16", adds<add_floats<numbers::F16, false>>},
    {"atom.add.bf16", adds<add_floats<numbers::BF16, false>>},
    {"atom.add.f16x2", adds<add_pairs<numbers::F16>>},
    {"atom.add.bf16x2", adds<add_pairs<numbers::BF16>>},
    {"cvta", cvta},
    {"isspacep", isspacep},
    {"fence membar", fence},
    {"prefetch prefetchu discard applypriority createpolicy pmevent brkpt", nothing},
};

}  // namespace memory

inline uint8_t* Machine::access(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space,
                                unsigned use) {
    return memory::touch_once(w, i, lane, address, bytes, space, use, bytes);
}
