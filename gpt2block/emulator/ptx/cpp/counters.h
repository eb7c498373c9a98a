// Counts what decides the speed of a kernel, for each line of the .cu, as the memory units of a GPU see it.
//
// A warp instruction that accesses memory is one request. It touches sectors of 32 bytes of global memory. Shared
// memory serves accesses of 8 bytes for half a warp at a time, of 16 bytes for a quarter: a pass. Two passes are one if
// both lanes of each pair have the same address. A pass takes as many turns as the bank with the most distinct words of
// 4 bytes; every turn but the first is a conflict.
#pragma once
#include "memory.h"

struct Counts {  // of a line; in the order of counters.py
    int64_t instructions, load_requests, load_sectors, load_bytes, store_requests, store_sectors, store_bytes;
    int64_t copied_bytes, atomics, shared_requests, bank_conflicts, local_bytes, shuffles, barriers;
    int64_t branches, uniform_branches;
};

namespace counters {

constexpr unsigned SECTOR = 32, WORD = 4, BANKS = 32;  // bytes, bytes, number

inline Counted kind_of(const Form& f) {
    if (f.has("param::func")) return Counted::nothing;  // an argument of a call
    if (f.name == "ld" || f.name == "ldu") return Counted::load;
    if (f.name == "st") return f.has("async") ? Counted::nothing : Counted::store;
    if (f.name == "atom" || f.name == "red") return Counted::atomic;
    if (f.name == "ldmatrix" || f.name == "stmatrix") return Counted::matrices;
    if (f.name == "cp" && (f.has("ca") || f.has("cg")) && !f.has("bulk")) return Counted::copy;
    if (f.name == "shfl") return Counted::shuffle;
    if (f.name == "bra" || f.name == "brx") return Counted::branch;
    return (f.name == "bar" || f.name == "barrier") && !f.has("warp") ? Counted::barrier : Counted::nothing;
}

// The distinct numbers of the units that the lanes of a pass touch.
inline const std::vector<uint64_t>& units(const uint64_t* address, Mask pass, unsigned bytes, unsigned unit) {
    static thread_local std::vector<uint64_t> found;
    found.clear();
    for_lanes(pass, [&](int l) {
        for (uint64_t n = address[l] / unit; n <= (address[l] + bytes - 1) / unit; ++n) found.push_back(n);
    });
    if (!std::is_sorted(found.begin(), found.end())) std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

inline int64_t conflicts(const std::vector<uint64_t>& words) {
    std::array<int64_t, BANKS> turns{};
    for (uint64_t word : words) ++turns[word % BANKS];
    return *std::max_element(turns.begin(), turns.end()) - 1;
}

inline bool paired(const uint64_t* address, Mask lanes) {
    const Mask pairs = lanes & lanes >> 1 & 0x55555555u;
    if ((pairs | pairs << 1) != lanes) return false;
    bool same = true;
    for_lanes(pairs, [&](int l) { same &= address[l] == address[l + 1]; });
    return same;
}

template <class Visit>
void each_pass(const uint64_t* address, Mask lanes, unsigned bytes, Visit visit) {
    unsigned width = bytes > 8 ? 8 : bytes > 4 ? 16 : 32;
    if (width < LANES && paired(address, lanes)) width *= 2;
    for (unsigned first = 0; first < LANES; first += width) {
        const Mask pass = lanes & (Mask)(((1ull << width) - 1) << first);
        if (pass) visit(pass);
    }
}

inline Space place_of(Space space, uint64_t address) {
    if (space == Space::cluster) return Space::shared;
    if (space != Space::generic) return space;
    const uint64_t tag = address >> ARRAY_SHIFT << ARRAY_SHIFT;
    if (tag == SHARED_WINDOW) return Space::shared;
    return tag == LOCAL_WINDOW ? Space::local : tag == PARAM_WINDOW ? Space::param : Space::global;
}

inline void count_shared(Counts& line, const uint64_t* address, Mask lanes, unsigned bytes) {
    ++line.shared_requests;
    each_pass(address, lanes, bytes, [&](Mask pass) {
        line.bank_conflicts += conflicts(units(address, pass, bytes, WORD));
    });
}

inline void count_global(Counts& line, const uint64_t* address, Mask lanes, unsigned bytes, bool stores) {
    ++(stores ? line.store_requests : line.load_requests);
    (stores ? line.store_bytes : line.load_bytes) += (int64_t)bytes * __builtin_popcount(lanes);
    (stores ? line.store_sectors : line.load_sectors) += (int64_t)units(address, lanes, bytes, SECTOR).size();
}

inline unsigned bytes_of(Warp& w, const Instr& i, int value, Mask active) {
    if (i.form->counted == Counted::copy) return (unsigned)w.in(i, 2)[__builtin_ctz(active)];
    if (i.form->counted == Counted::matrices) return 16;
    return std::min(i.form->type().bits, 64u) / 8 * (unsigned)i.op[value].count;
}

inline void count_access(Counts& line, Warp& w, const Instr& i, Mask active) {
    const Form& f = *i.form;
    const bool loads = f.counted == Counted::load;
    const int where = loads || f.name == "atom" || f.name == "ldmatrix" ? 1 : 0;
    const int value = where == 1 && !f.has("cas") ? 0 : where + 1;
    const unsigned bytes = bytes_of(w, i, value, active);
    if (f.counted == Counted::matrices && i.op[value].count < 4) active &= (1u << 8 * i.op[value].count) - 1;
    const Space space = f.counted == Counted::copy ? Space::shared : f.space;
    uint64_t address[LANES];
    for_lanes(active, [&](int l) { address[l] = w.address(i, where, l); });
    const auto in = [&](Space one) {
        return lanes_where(active, [&](int l) { return place_of(space, address[l]) == one; });
    };
    const Mask shared = in(Space::shared), local = in(Space::local), global = in(Space::global);
    line.local_bytes += (int64_t)bytes * __builtin_popcount(local);
    line.atomics += f.counted == Counted::atomic;
    if (shared) count_shared(line, address, shared, bytes);
    if (global && f.counted != Counted::atomic) count_global(line, address, global, bytes, !loads);
}

inline void count_copied(const Warp& w, const Instr& i, unsigned bytes) {
    if (w.machine.counts) w.machine.counts[i.place].copied_bytes += bytes;
}

// The reads of cp.async are loads. A lane that copies no bytes only writes zeros.
inline void count_source(Counts& line, Warp& w, const Instr& i, Mask active) {
    uint64_t address[LANES];
    Mask lanes = 0;
    for_lanes(active, [&](int l) {
        address[l] = w.address(i, 1, l);
        const bool reads = i.count < 4 || i.op[3].kind != Operand::row || (uint32_t)w.in(i, 3)[l];
        lanes |= (Mask)reads << l;
    });
    if (!lanes) return;
    ++line.load_requests;
    line.load_sectors += (int64_t)units(address, lanes, bytes_of(w, i, 0, active), SECTOR).size();
}

// An instruction of a group of lanes, of which the guard leaves some active.
inline void count(Warp& w, const Instr& i, Mask group, Mask active) {
    Counts& line = w.machine.counts[i.place];
    const Counted kind = i.form->counted;
    ++line.instructions;
    if (kind == Counted::branch && i.guard >= 0) ++line.branches, line.uniform_branches += !active || active == group;
    if (!active) return;
    line.shuffles += kind == Counted::shuffle, line.barriers += kind == Counted::barrier;
    if (kind >= Counted::load) count_access(line, w, i, active);
    if (kind == Counted::copy) count_source(line, w, i, active);
}

}  // namespace counters
