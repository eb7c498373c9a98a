// Memory: where addresses lead, bounds, alignment, bytes that nobody has written; loads, stores and atomic operations.
#pragma once
#include "numbers.h"
#include "alu.h"  // defines a macro that numbers.h removes
#include "races.h"

namespace memory {

constexpr uint8_t GAP = 2;  // in place of 0 or 1, whether a byte was written: it is between variables

struct Region {  // what an address points to
    uint8_t *data = nullptr, *written = nullptr;  // of the first byte
    uint64_t bytes = 0;
    int64_t offset = 0;  // of the address
    int array = Finding::nowhere;
    Shadow* shadow = nullptr;
    bool constant = false;
};

inline Region shared_of(Block& block, uint64_t offset) {
    Block* owner = &block;
    const uint64_t rank = offset >> RANK_SHIFT;
    if (rank && rank <= block.cluster.size()) owner = block.cluster[rank - 1];
    const int64_t at = rank <= block.cluster.size() ? (int64_t)(offset & ((1u << RANK_SHIFT) - 1)) : (int64_t)(int32_t)offset;
    return {owner->shared.data(), owner->written.data(), owner->shared.size(), at, Finding::in_shared, owner->shadow.get()};
}

inline Region local_of(Warp& w, int thread, int64_t offset) {
    const uint64_t bytes = w.machine.program->local_bytes, start = bytes * (uint64_t)thread;
    return {w.block.local.data() + start, w.block.local_written.data() + start, bytes, offset, Finding::in_local};
}

inline Region find(Warp& w, const Instr& i, int lane, uint64_t address, Space space) {
    Machine& m = w.machine;
    if (space == Space::shared || space == Space::cluster) return shared_of(w.block, (uint32_t)address);
    if (space == Space::local) return local_of(w, w.thread(lane), (int32_t)address);
    const uint64_t tag = address >> ARRAY_SHIFT, low = address & ((1ull << ARRAY_SHIFT) - 1);
    if (space == Space::param || tag == PARAM_WINDOW >> ARRAY_SHIFT) {
        Region params = {m.params.data(), nullptr, m.params.size(), (int64_t)low, Finding::in_params};
        params.constant = true;
        return params;
    }
    if (tag == SHARED_WINDOW >> ARRAY_SHIFT && space == Space::generic) return shared_of(w.block, low);
    if (tag == LOCAL_WINDOW >> ARRAY_SHIFT && space == Space::generic) {
        const int owner = (int)(low >> RANK_SHIFT);
        if (owner == w.thread(lane)) return local_of(w, owner, (int64_t)(low & ((1u << RANK_SHIFT) - 1)));
        Finding found;
        found.kind = "race", found.verb = "touches", found.array = Finding::in_local;
        found.text = "a local variable of another thread";
        found.now = w.here(i, lane), found.other = {w.block.number, owner, -1};
        throw found;
    }
    if (tag >= FIRST_ARRAY && tag - FIRST_ARRAY < m.arrays.size()) {
        const int number = (int)(tag - FIRST_ARRAY);
        Array& array = m.arrays[number];
        return {array.data, array.written, array.bytes, (int64_t)low - (int64_t)ARRAY_START, number, array.shadow.get(), array.constant};
    }
    return {nullptr, nullptr, 0, (int64_t)address, Finding::nowhere};
}

[[gnu::cold]] inline Finding refused(const Warp& w, const Instr& i, int lane, const Region& region, unsigned bytes, unsigned use,
                       const char* kind) {
    Finding found;
    found.kind = kind;
    found.verb = Races::is(use);
    found.now = w.here(i, lane);
    found.array = region.array, found.byte = region.offset, found.bytes = bytes;
    return found;
}

[[noreturn]] inline void refuse(Warp& w, const Instr& i, int lane, const Region& region, unsigned bytes, unsigned use,
                                const char* kind) {
    if (w.machine.trace) w.machine.trace->access(w, i, lane, region.array, region.offset, bytes, use, nullptr);
    throw refused(w, i, lane, region, bytes, use, kind);
}

[[noreturn, gnu::cold]] inline void refuse_gap(Warp& w, const Instr& i, int lane, Region region, uint64_t from, unsigned bytes, unsigned use) {
    region.offset = (int64_t)from;
    refuse(w, i, lane, region, bytes, use, "out of bounds");
}

[[gnu::cold]] inline void note_unwritten(Warp& w, const Instr& i, int lane, Region region, uint64_t from, unsigned bytes, unsigned use) {
    for (const Finding& note : w.machine.notes) {
        if (note.array == region.array) return;
    }
    region.offset = (int64_t)from;
    w.machine.notes.push_back(refused(w, i, lane, region, bytes, use, "unwritten"));
    if (w.machine.trace && !region.shadow) w.machine.trace->access(w, i, lane, region.array, region.offset, bytes, use, region.data + from);
}

inline void check_written(Warp& w, const Instr& i, int lane, const Region& region, uint64_t from, unsigned bytes,
                          unsigned use) {
    uint8_t* written = region.written + from;
    if ((written[0] | written[bytes - 1]) & GAP) refuse_gap(w, i, lane, region, from, bytes, use);
    // Copies of structures read the padding of local variables, and a byte of empty ones.
    const bool padded = region.array == Finding::in_local && (bytes == 1 || std::memchr(written, 1, bytes));
    if (use & READS && !padded && std::memchr(written, 0, bytes)) note_unwritten(w, i, lane, region, from, bytes, use);
    if (use & WRITES) std::memset(written, 1, bytes);
}

inline void check_place(Warp& w, const Instr& i, int lane, const Region& region, unsigned bytes, unsigned use) {
    if (region.offset < 0 || (uint64_t)region.offset + bytes > region.bytes) {
        refuse(w, i, lane, region, bytes, use, "out of bounds");
    }
    if (region.constant && use & WRITES) refuse(w, i, lane, region, bytes, use, "constant");
    const uint8_t* early = w.machine.early;
    if (early && region.array >= 0 && !early[region.array] && !(w.waited >> lane & 1)) {
        refuse(w, i, lane, region, bytes, use, "before the wait");
    }
}

inline Space space_of(const Form& f) {
    for (const std::string& word : f.modifiers) {
        if (word == "global") return Space::global;
        if (word == "shared" || word == "shared::cta") return Space::shared;
        if (word == "shared::cluster") return Space::cluster;
        if (word == "local") return Space::local;
        if (word.compare(0, 5, "param") == 0) return Space::param;
        if (word == "const") return Space::constant;
    }
    return Space::generic;
}

// Loads and stores. arg[0]: space, arg[1]: bytes of an element, arg[2]: use, arg[3]: a sum of Details.
enum Details { RELEASES = 1, OF_BLOCK = 2 };

inline void prepare(Form& f, unsigned use) {
    const bool relaxed = f.has("relaxed") || f.has("volatile") || f.has("acquire") || f.has("release") || f.has("acq_rel");
    f.arg[0] = (int64_t)space_of(f);
    f.arg[1] = f.type().bits / 8;
    f.arg[2] = use | (relaxed && use != (READS | WRITES) ? +STRONG : 0) | (f.has("nc") ? +READ_ONLY : 0);
    f.arg[3] = (f.has("release") || f.has("acq_rel") ? +RELEASES : 0) | (f.has("cta") ? +OF_BLOCK : 0);
}

inline uint64_t generic_address(const Warp& w, int lane, uint64_t address, Space space) {
    if (space == Space::shared || space == Space::cluster) return SHARED_WINDOW + (uint32_t)address;
    if (space == Space::local) return LOCAL_WINDOW + ((uint64_t)w.thread(lane) << RANK_SHIFT) + (uint32_t)address;
    return space == Space::param ? PARAM_WINDOW + address : address;
}

// Before and after a strong access: what it releases, what it acquires.
inline void before(Warp& w, const Form& f, Mask active) {
    if (f.arg[3] & RELEASES && w.machine.races) w.machine.races->fence(w, active, !(f.arg[3] & OF_BLOCK));
}

inline void after(Warp& w, const Form& f, int lane, uint64_t address, unsigned use) {
    if (!(use & STRONG) || !w.machine.races) return;
    const uint64_t key = generic_address(w, lane, address, (Space)f.arg[0]);
    if (use & READS) w.machine.races->learn(w, lane, key);
    if (use & WRITES) w.machine.races->tell(w, lane, key, !(use & ATOMIC));
}

// Where lanes access memory, with all checks. The region of a lane usually serves the next lanes, too.
inline void locate(Warp& w, const Instr& i, Mask active, int where, unsigned bytes, Space space, unsigned use,
                   uint8_t* (&at)[LANES]) {
    Machine& m = w.machine;
    const uint64_t* base = w.in(i, where);
    const uint64_t offset = (uint64_t)i.op[where].offset;
    const bool narrow = space == Space::shared || space == Space::cluster;
    const bool own = space == Space::local || space == Space::generic;  // lanes may have regions of their own
    Region region;
    uint64_t origin = 0, room = 0;  // address of the region's first byte; bytes where an access may begin
    for (Mask rest = active; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const uint64_t address = narrow ? (uint32_t)(base[l] + offset) : base[l] + offset;
        uint64_t from = address - origin;
        if (from >= room || own || m.early) {
            region = find(w, i, l, address, space);
            check_place(w, i, l, region, bytes, use);
            from = (uint64_t)region.offset, origin = address - from, room = region.bytes - bytes + 1;
        }
        if (from & (bytes - 1)) region.offset = (int64_t)from, refuse(w, i, l, region, bytes, use, "misaligned");
        at[l] = region.data + from;
        if (!m.checks) continue;
        if (region.written) check_written(w, i, l, region, from, bytes, use);
        if (region.shadow) m.races->record(w, i, l, *region.shadow, from, bytes, use, at[l]);
    }
}

template <class T, bool STORE>
void move(Warp& w, const Instr& i, Mask active) {
    const Form& f = *i.form;
    const int value = STORE ? 1 : 0, where = STORE ? 0 : 1, count = i.op[value].count;
    const unsigned use = (unsigned)f.arg[2];
    uint8_t* at[LANES];
    if (STORE) before(w, f, active);
    locate(w, i, active, where, sizeof(T) * count, (Space)f.arg[0], use, at);
    for (int k = 0; k < count; ++k) {
        if constexpr (STORE) {
            const uint64_t* a = w.in(i, value, k);
            for_lanes(active, [&](int l) {
                const T bits = (T)a[l];
                std::memcpy(at[l] + k * sizeof(T), &bits, sizeof bits);
            });
        } else {
            uint64_t* d = w.out(i, value, k);
            for_lanes(active, [&](int l) {
                T bits;
                std::memcpy(&bits, at[l] + k * sizeof(T), sizeof bits);
                d[l] = (uint64_t)(int64_t)bits;
            });
        }
    }
    if (use & STRONG) for_lanes(active, [&](int l) { after(w, f, l, w.address(i, where, l), use); });
}

template <bool STORE>
Handler pick_move(Form& f) {
    prepare(f, STORE ? WRITES : READS);
    if (f.type().bits == 128) return move<uint64_t, STORE>;  // a .b128 is a vector of two
    return alu::for_type<true, true>(f.type(), [](auto zero) -> Handler { return move<decltype(zero), STORE>; });
}

// Atomic operations, one lane after the other. `from` and `to` are values of the element's width.
using Change = uint64_t (*)(uint64_t old, uint64_t b, uint64_t c);

template <class Op>
Change integer(const Type& type) {
    const bool sign = type.is_signed();
    if (type.bits == 64) {
        if (sign) return [](uint64_t a, uint64_t b, uint64_t) { return (uint64_t)Op::of((int64_t)a, (int64_t)b); };
        return [](uint64_t a, uint64_t b, uint64_t) { return (uint64_t)Op::of(a, b); };
    }
    if (sign) return [](uint64_t a, uint64_t b, uint64_t) { return (uint64_t)(uint32_t)Op::of((int32_t)a, (int32_t)b); };
    return [](uint64_t a, uint64_t b, uint64_t) { return (uint64_t)Op::of((uint32_t)a, (uint32_t)b); };
}

OPERATION(Inc, (T a, T b), return (T)(a >= b ? 0 : a + 1))
OPERATION(Dec, (T a, T b), return (T)(a == 0 || a > b ? b : a - 1))
OPERATION(Exch, (T, T b), return b)

inline Change change_of(const Form& f) {
    const Type& type = f.type();
    if (f.has("cas")) return [](uint64_t a, uint64_t b, uint64_t c) { return a == b ? c : a; };
    if (type.kind == 'f') return nullptr;
    if (f.has("add")) return integer<alu::Add>(type);
    if (f.has("min")) return integer<alu::Min>(type);
    if (f.has("max")) return integer<alu::Max>(type);
    if (f.has("and")) return integer<alu::And>(type);
    if (f.has("or")) return integer<alu::Or>(type);
    if (f.has("xor")) return integer<alu::Xor>(type);
    if (f.has("exch")) return integer<Exch>(type);
    if (f.has("inc")) return integer<Inc>(type);
    return f.has("dec") ? integer<Dec>(type) : nullptr;
}

static void atom(Warp& w, const Instr& i, Mask active) {
    Machine& m = w.machine;
    const Form& f = *i.form;
    const bool result = f.name == "atom";
    const int where = result ? 1 : 0, count = i.op[where + 1].count;
    const unsigned bytes = (unsigned)f.arg[1], use = READS | WRITES | STRONG | ATOMIC;
    const Space space = (Space)f.arg[0];
    const Change change = (Change)f.arg[2];
    const bool compares = f.has("cas");
    before(w, f, active);
    Mask rest = active;
    while (rest) {
        const int l = m.order == Order::reverse ? 31 - __builtin_clz(rest) : __builtin_ctz(rest);
        rest &= ~(1u << l);
        const uint64_t address = w.address(i, where, l);
        if (compares && m.races) {
            const Region region = find(w, i, l, address, space);
            if (region.shadow && region.offset >= 0 && (uint64_t)region.offset + bytes <= region.bytes) {
                m.races->compared(w, l, *region.shadow, (uint64_t)region.offset, bytes, w.in(i, where + 1)[l]);
            }
        }
        uint8_t* at = m.access(w, i, l, address, bytes * count, space, use);
        for (int k = 0; k < count; ++k, at += bytes) {
            uint64_t old = 0;
            std::memcpy(&old, at, bytes);
            uint64_t b = w.in(i, where + 1, k)[l];
            if (bytes < 8) b &= (1ull << 8 * bytes) - 1;
            const uint64_t made = change(old, b, compares ? w.in(i, where + 2)[l] : 0);
            std::memcpy(at, &made, bytes);
            if (result) w.out(i, 0, k)[l] = old;
        }
        after(w, f, l, address, use);
    }
    if (compares) w.yields = true;  // a loop around it may wait for another thread
}

Change float_change(const Form& f);

static Handler pick_atom(Form& f) {
    if (f.type().bits > 64) return nullptr;
    prepare(f, READS | WRITES);
    const Change change = f.type().kind == 'f' && !f.has("exch") && !f.has("cas") ? float_change(f) : change_of(f);
    f.arg[2] = (int64_t)change;
    return change ? atom : nullptr;
}

// add, min and max of floating-point elements, with the functions of numbers.h. Sums of pairs are two sums.
template <class F, bool FTZ>
uint64_t add_float(uint64_t a, uint64_t b, uint64_t) {
    numbers::Way way;
    way.ftz = FTZ;
    return numbers::Add::run<F>(a, b, 0, way);
}
template <class F>
uint64_t add_pair(uint64_t a, uint64_t b, uint64_t) {
    return add_float<F, false>(a & 0xffff, b & 0xffff, 0) | add_float<F, false>(a >> 16, b >> 16, 0) << 16;
}

inline Change float_change(const Form& f) {
    const Type& type = f.type();
    if (!f.has("add")) return nullptr;
    // Outside of shared memory, subnormal numbers are flushed to zero.
    if (type.is("f32")) return f.arg[0] == (int64_t)Space::shared ? add_float<numbers::F32, false> : add_float<numbers::F32, true>;
    if (type.is("f64")) return add_float<numbers::F64, false>;
    if (type.is("f16")) return add_float<numbers::F16, false>;
    if (type.is("bf16")) return add_float<numbers::BF16, false>;
    if (type.is("f16x2")) return add_pair<numbers::F16>;
    return type.is("bf16x2") ? add_pair<numbers::BF16> : nullptr;
}

static void cvta(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    uint64_t* d = w.out(i, 0);
    const Space space = (Space)i.form->arg[0];
    const uint64_t low = (1ull << (space == Space::local ? RANK_SHIFT : 32)) - 1;
    const bool window = space == Space::shared || space == Space::cluster || space == Space::local || space == Space::param;
    const bool to = i.form->arg[1];
    for_lanes(active, [&](int l) { d[l] = !window ? a[l] : to ? a[l] & low : generic_address(w, l, a[l], space); });
}

static void isspacep(Warp& w, const Instr& i, Mask active) {
    const uint64_t* a = w.in(i, 1);
    const Space space = (Space)i.form->arg[0];
    Mask holds = 0;
    for_lanes(active, [&](int l) {
        const uint64_t tag = a[l] >> ARRAY_SHIFT;
        const bool of_windows[] = {false, tag >= FIRST_ARRAY, tag == 1, tag == 2, tag == 3, tag >= FIRST_ARRAY, tag == 1};
        holds |= (Mask)of_windows[(int)space] << l;
    });
    w.set_predicate(i, 0, active, holds);
}

static void fence(Warp& w, const Instr& i, Mask active) {
    const bool of_device = i.form->arg[0];
    if (w.machine.trace) w.machine.trace->each(w, i, active, of_device ? "__threadfence()" : "__threadfence_block()");
    if (w.machine.races) w.machine.races->fence(w, active, of_device);
}

static void nothing(Warp&, const Instr&, Mask) {}

static const Register all_[] = {
    {{"ld", "ldu"}, pick_move<false>},
    {{"st"}, pick_move<true>},
    {{"atom", "red"}, pick_atom},
    {{"cvta"}, [](Form& f) -> Handler { f.arg[0] = (int64_t)space_of(f), f.arg[1] = f.has("to"); return cvta; }},
    {{"isspacep"}, [](Form& f) -> Handler { f.arg[0] = (int64_t)space_of(f); return isspacep; }},
    {{"fence", "membar"}, [](Form& f) -> Handler { f.arg[0] = !f.has("cta"); return fence; }},
    {{"prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "pmevent", "brkpt"},
     [](Form&) -> Handler { return nothing; }},
};

}  // namespace memory

inline uint8_t* Machine::access(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space,
                                unsigned use) {
    using namespace memory;
    const Region region = find(w, i, lane, address, space);
    check_place(w, i, lane, region, bytes, use);
    if ((uint64_t)region.offset % bytes) refuse(w, i, lane, region, bytes, use, "misaligned");
    uint8_t* data = region.data + region.offset;
    if (!checks) return data;
    if (region.written) check_written(w, i, lane, region, (uint64_t)region.offset, bytes, use);
    if (region.shadow) races->record(w, i, lane, *region.shadow, (uint64_t)region.offset, bytes, use, data);
    return data;
}
