// Finds data races: two unordered accesses to a cell by different threads, at least one of them a write.
//
// Every access has a stamp, the number of synchronisations so far. What a thread knows of another is the stamp up to
// which that thread's accesses precede its own next ones. Accesses are ordered by:
//   - a barrier of the block; in a warp every exchange (bar.warp.sync, shuffles) among the lanes of its mask;
//   - a fence, then an atomic or volatile write, then an atomic or volatile read of the same address by another thread:
//     accesses that the first thread made, or knew to be complete, before its fence precede the reader's next accesses.
//     A release is a fence before a write.
// Two strong accesses (atomic, volatile, relaxed) are no race. A thread's plain access is ordered after all atomic
// accesses to the same address that precede an earlier atomic access of the thread to it.
//
// A plain read that races is harmless if the thread only compares the value: if the thread's next access to the address
// is an atom.cas that expects the value read, the read counts as atomic. Until then, its races with atomic accesses are
// held. They are reported if the thread accesses the address in another way, reaches a barrier or ends.
#pragma once
#include "trace.h"

constexpr int BLOCK_SHIFT = 10;  // a block has at most 1024 threads

struct Stamped {
    uint32_t thread = 0, stamp = 0;  // block << BLOCK_SHIFT | thread; stamp 0: no access so far
    uint32_t place : 31, last : 1;   // last, of a read: its thread has not accessed the cell again
    uint32_t value = 0;              // of a read

    Stamped() : place(0), last(0) {}
    Stamped(uint32_t t, uint32_t s, int32_t at, bool l)
        : thread(t), stamp(s), place((uint32_t)at & 0x7fffffff), last(l) {}
    int64_t block() const { return thread >> BLOCK_SHIFT; }
    int in_block() const { return thread & ((1 << BLOCK_SHIFT) - 1); }
    bool same_warp(uint32_t other) const { return thread / LANES == other / LANES; }
};

struct Cell {  // the last write, and three reads: the last, by another thread of its warp, by another warp
    Stamped written, read[3];
};

struct StrongAccess : Stamped {
    bool atomic = false, writes = false;
};

struct Strong {  // the last strong accesses to a cell by two different threads
    StrongAccess written[2], read[2];
};

struct Shadow {
    static constexpr uint64_t PAGE = 64;  // cells
    std::vector<std::unique_ptr<Cell[]>> pages;
    std::unordered_map<uint64_t, Strong> strong;
    bool of_block;
    int array;  // for findings

    Shadow(uint64_t cells, bool shared, int number) : pages(cells / PAGE + 1), of_block(shared), array(number) {}
    Cell& at(uint64_t cell) {
        std::unique_ptr<Cell[]>& page = pages[cell / PAGE];
        if (!page) page = std::make_unique<Cell[]>(PAGE);
        return page[cell % PAGE];
    }
};

struct Known {  // accesses of a block's threads: of all up to `all`, of each up to its clock
    uint32_t all = 0;
    std::vector<uint32_t> clocks;

    void join(const Known& other) {
        all = std::max(all, other.all);
        if (clocks.size() < other.clocks.size()) clocks.resize(other.clocks.size());
        for (std::size_t k = 0; k < other.clocks.size(); ++k) clocks[k] = std::max(clocks[k], other.clocks[k]);
    }
};

using Blocks = std::map<int64_t, Known>;

inline void join(Blocks& blocks, const Blocks& others) {
    for (const auto& [number, known] : others) blocks[number].join(known);
}

struct Held {
    Shadow* shadow;
    uint64_t cell;
    uint32_t value;
    Finding race;
};

// What a thread has learnt from atomic and volatile reads, and what its fences make visible to other threads of the
// block and to all threads. Threads that synchronise merge all three.
struct Facts {
    enum { LEARNT, FOR_BLOCK, FOR_ALL, FACTS };
    Blocks of[FACTS];
    uint64_t version = 0;  // changes with `of`: threads with one version have the same; 0: `of` is empty
    std::vector<Held> held;

    void join(const Facts& other, uint64_t next = 0) {
        for (int k = 0; k < FACTS; ++k) ::join(of[k], other.of[k]);
        version = next;
    }
};

struct Races {
    Machine& machine;
    uint32_t now = 1;
    uint64_t versions = 0;                         // of facts
    std::unordered_map<uint64_t, Blocks> told[2];  // address → what its last strong writes told the block, and all
    bool facts = false;                            // whether any thread has any
    bool holds = false;                            // whether races have been held, or steps are recorded

    explicit Races(Machine& m) : machine(m) {}

    static Facts& facts_of(Thread& thread) {
        if (!thread.facts) thread.facts = std::make_shared<Facts>();
        return *thread.facts;
    }
    uint32_t number_of(const Warp& w, int lane) const {
        return (uint32_t)(w.block.number << BLOCK_SHIFT | w.thread(lane));
    }

    // Whether an access precedes those of a thread because of barriers alone, as almost all do.
    static bool usual(const Stamped& before, const Warp& w, uint32_t self) {
        if (!before.stamp || before.thread == self) return true;
        if (before.block() != w.block.number) return false;
        return before.stamp <= w.block.phase || (before.same_warp(self) && before.stamp <= w.met);
    }

    bool ordered(const Stamped& before, const Warp& w, int lane, uint32_t self) const {
        if (usual(before, w, self)) return true;
        const int64_t block = before.block();
        const int thread = before.in_block();
        const Thread& own = w.block.knowledge[w.thread(lane)];
        if (before.same_warp(self) && !own.of.empty() && before.stamp <= own.of[thread % LANES]) return true;
        if (!own.facts) return false;
        const Blocks& learnt = own.facts->of[Facts::LEARNT];
        const auto known = learnt.find(block);
        if (known == learnt.end()) return false;
        if (before.stamp <= known->second.all) return true;
        return (std::size_t)thread < known->second.clocks.size() && before.stamp <= known->second.clocks[thread];
    }

    struct Now {
        Warp& w;
        const Instr& i;
        int lane;
        unsigned use;
        Shadow& shadow;
        uint64_t cell;
        Stamped access;
        unsigned bytes;  // of the whole element that the lane accesses
    };

    static const char* is(unsigned use) {
        if (use & ATOMIC) return "atomically changes";
        if (use & STRONG) return use & WRITES ? "writes (volatile)" : "reads (volatile)";
        return use & WRITES ? "writes" : "reads";
    }

    Finding race(const Now& now, const Stamped& before, const char* was) const {
        return {.kind = "race", .now = now.w.here(now.i, now.lane),
                .other = {before.block(), before.in_block(), (int32_t)before.place}, .verb = is(now.use),
                .other_verb = was, .array = now.shadow.array,
                .byte = (int64_t)(now.cell * machine.program->granule), .bytes = now.bytes};
    }
    static const char* was(const StrongAccess& a) {
        return a.atomic ? "atomically changed" : a.writes ? "wrote (volatile)" : "read (volatile)";
    }

    // Returns the thread of a plain read if it may still compare the value with an atom.cas, or null.
    Thread* may_compare(const Stamped& read) const {
        for (const auto& block : machine.in_flight) {
            if (block->number != read.block() || !read.last || read.stamp <= block->phase) continue;
            const Warp& w = block->warps[read.in_block() / LANES];
            if (w.state[read.in_block() % LANES] != Lane::done) return &block->knowledge[read.in_block()];
        }
        return nullptr;
    }

    Held* held_at(Thread& thread, const Shadow& shadow, uint64_t cell) const {
        if (!thread.facts) return nullptr;
        for (Held& held : thread.facts->held) {
            if (held.shadow == &shadow && held.cell == cell) return &held;
        }
        return nullptr;
    }
    void hold(Thread& thread, const Held& held) {
        facts = holds = true;
        if (!held_at(thread, *held.shadow, held.cell)) facts_of(thread).held.push_back(held);
    }
    void report_held(const Thread& thread) const {
        if (thread.facts && !thread.facts->held.empty()) throw thread.facts->held.front().race;
    }

    static void keep(StrongAccess (&kept)[2], const StrongAccess& now) {
        if (kept[0].thread != now.thread) kept[1] = kept[0];
        kept[0] = now;
    }
    static void keep_read(Stamped (&kept)[3], const Stamped& now) {
        const Stamped last = kept[0];
        if (last.stamp && last.thread != now.thread) kept[last.same_warp(now.thread) ? 1 : 2] = last;
        kept[0] = now;
    }

    void check_reads(const Now& now, const Cell& cell) {
        for (const Stamped& read : cell.read) {
            if (ordered(read, now.w, now.lane, now.access.thread)) continue;
            const Finding found = race(now, read, "read");
            Thread* reader = now.use & ATOMIC ? may_compare(read) : nullptr;
            if (!reader) throw found;
            hold(*reader, {&now.shadow, now.cell, read.value, found});
        }
    }

    void check_strong(const Now& now, const Strong& strong) {
        const auto& [last, other] = strong.written;
        // If the last atomic access is by this thread, it has seen all earlier ones: atomic accesses have a single
        // order.
        const bool own = last.stamp && last.thread == now.access.thread && last.atomic;
        for (const StrongAccess* before : {&last, &other}) {
            if (before == &other && own) break;
            if (ordered(*before, now.w, now.lane, now.access.thread)) continue;
            const Finding found = race(now, *before, was(*before));
            if (now.use & WRITES || !before->atomic) throw found;
            hold(now.w.block.knowledge[now.w.thread(now.lane)], {&now.shadow, now.cell, now.access.value, found});
        }
        if (!(now.use & WRITES)) return;
        for (const StrongAccess& before : strong.read) {
            if (!ordered(before, now.w, now.lane, now.access.thread)) throw race(now, before, was(before));
        }
    }

    void check(const Now& now) {
        Cell& cell = now.shadow.at(now.cell);
        const uint32_t self = now.access.thread;
        Thread& own = now.w.block.knowledge[now.w.thread(now.lane)];
        if (Held* held = holds ? held_at(own, now.shadow, now.cell) : nullptr) throw held->race;
        for (Stamped& read : cell.read) read.last &= read.thread != self;
        if (!ordered(cell.written, now.w, now.lane, self)) throw race(now, cell.written, "wrote");
        if (now.use & WRITES) check_reads(now, cell);
        const auto found = now.shadow.strong.empty() ? now.shadow.strong.end() : now.shadow.strong.find(now.cell);
        if (!(now.use & STRONG)) {
            if (found != now.shadow.strong.end()) check_strong(now, found->second);
            now.use & WRITES ? void(cell.written = now.access) : keep_read(cell.read, now.access);
            return;
        }
        Strong& strong = found != now.shadow.strong.end() ? found->second : now.shadow.strong[now.cell];
        if (!(now.use & ATOMIC) && now.shadow.of_block) check_volatile(now, strong.written[0]);
        StrongAccess kept;
        static_cast<Stamped&>(kept) = now.access;
        kept.atomic = now.use & ATOMIC, kept.writes = now.use & WRITES;
        keep(now.use & WRITES ? strong.written : strong.read, kept);
    }

    // Lanes of a warp that exchange values by volatile shared memory alone, as before Volta.
    void check_volatile(const Now& now, const StrongAccess& before) const {
        if (!before.stamp || before.block() != now.w.block.number || before.atomic) return;
        if (!before.same_warp(now.access.thread)) return;
        if (ordered(before, now.w, now.lane, now.access.thread)) return;
        Finding found = race(now, before, was(before));
        found.text = "volatile orders no threads, which __syncwarp() does";
        throw found;
    }

    // Records an access that needs no look at strong accesses and facts. Returns false if it may race.
    [[gnu::always_inline]] static bool plain(Cell& cell, const Warp& w, const Stamped& access, bool writes) {
        if (!usual(cell.written, w, access.thread)) return false;
        if (writes) {
            for (Stamped& read : cell.read) {
                if (read.thread == access.thread) read.last = 0;
                if (!usual(read, w, access.thread)) return false;
            }
            cell.written = access;
            return true;
        }
        Stamped &last = cell.read[0], &other = cell.read[1];
        const bool near = last.stamp == access.stamp && last.same_warp(access.thread);
        if (near && other.stamp == access.stamp && other.same_warp(access.thread) && other.thread != access.thread) {
            last.thread = access.thread, last.place = access.place, last.last = 1, last.value = access.value;
            return true;  // two lanes of a warp that read a cell stand for all
        }
        for (int k = 1; k < 3; ++k) cell.read[k].last &= cell.read[k].thread != access.thread;
        keep_read(cell.read, access);
        return true;
    }

    static uint32_t value_at(const uint8_t* data, unsigned granule) {
        uint32_t value = 0;
        std::memcpy(&value, data, std::min(granule, 4u));
        return value;
    }

    // The read-only cache may hold the old value of what the kernel has written, until the kernel ends.
    void check_read_only(Now now, uint64_t end) const {
        now.access = Stamped(number_of(now.w, now.lane), this->now, now.w.here(now.i, now.lane).place, true);
        for (; now.cell < end; ++now.cell) {
            const Stamped& written = now.shadow.at(now.cell).written;
            if (!written.stamp) continue;
            Finding found = race(now, written, "wrote");
            found.kind = "read-only";
            found.text = "the read-only cache may hold the old value";
            throw found;
        }
    }

    // Records the access of a lane to bytes from `start` on of an array or of shared memory. data: where they are.
    void record(Warp& w, const Instr& i, int lane, Shadow& shadow, uint64_t start, unsigned bytes, unsigned use,
                const uint8_t* data) {
        const unsigned granule = machine.program->granule, shift = (unsigned)__builtin_ctz(granule);
        const bool simple = !holds && shadow.strong.empty() && !(use & STRONG);
        const bool values = machine.program->compares && !(use & WRITES);
        const uint32_t self = number_of(w, lane);
        const uint64_t end = (start + bytes + granule - 1) >> shift;
        if (!simple && machine.trace) machine.trace->access(w, i, lane, shadow.array, (int64_t)start, bytes, use, data);
        if (use & READ_ONLY) check_read_only({w, i, lane, use, shadow, start >> shift, {}, bytes}, end);
        for (uint64_t cell = start >> shift; cell < end; ++cell) {
            Stamped access(self, now, w.here(i, lane).place, true);
            if (values) access.value = value_at(data + ((cell << shift) - start), granule);
            if (simple && plain(shadow.at(cell), w, access, use & WRITES)) continue;
            check({w, i, lane, use, shadow, cell, access, bytes});
        }
    }

    // Called before an atom.cas that expects a value: if the thread's last plain read of the cells gave it, the read
    // counts as atomic, and its held races are dropped.
    void compared(Warp& w, int lane, Shadow& shadow, uint64_t start, unsigned bytes, uint64_t expected) {
        const unsigned granule = machine.program->granule;
        const uint32_t self = number_of(w, lane), ones = granule < 4 ? (1u << 8 * granule) - 1 : ~0u;
        Thread& thread = w.block.knowledge[w.thread(lane)];
        for (uint64_t k = 0; k * granule < bytes; ++k) {
            const uint64_t cell = start / granule + k;
            const uint32_t value = (uint32_t)(expected >> 8 * granule * k) & ones;
            const Held* held = held_at(thread, shadow, cell);
            bool same = held && held->value == value;
            for (const Stamped& read : shadow.at(cell).read) {
                same |= !held && read.thread == self && read.stamp > w.block.phase && read.last && read.value == value;
            }
            if (!same) return;
        }
        for (uint64_t cell = start / granule; cell * granule < start + bytes; ++cell) {
            if (thread.facts) {
                std::vector<Held>& held = thread.facts->held;
                held.erase(std::remove_if(held.begin(), held.end(), [&](const Held& each) {
                    return each.shadow == &shadow && each.cell == cell;
                }), held.end());
            }
            for (Stamped& read : shadow.at(cell).read) {
                if (read.thread != self || !read.stamp || !read.last) continue;
                StrongAccess kept;
                static_cast<Stamped&>(kept) = read;
                keep(shadow.strong[cell].read, kept);
                read = {};
            }
        }
    }

    // Everything that a thread knows to be complete, with its own accesses until now.
    Blocks knowledge(const Warp& w, int lane) const {
        const Thread& self = w.block.knowledge[w.thread(lane)];
        Blocks all;
        if (self.facts) all = self.facts->of[Facts::LEARNT];
        Known own;
        own.all = w.block.phase;
        own.clocks.resize(w.block.knowledge.size());
        for (int k = 0; k < LANES && w.first + k < (int)own.clocks.size(); ++k) {
            own.clocks[w.first + k] = std::max(w.met, self.of.empty() ? 0 : self.of[k]);
        }
        own.clocks[w.thread(lane)] = now;
        all[w.block.number].join(own);
        return all;
    }

    void fence(Warp& w, Mask lanes, bool of_device) {
        facts = true;
        for_lanes(lanes, [&](int l) {
            Facts& own = facts_of(w.block.knowledge[w.thread(l)]);
            join(own.of[Facts::FOR_BLOCK], knowledge(w, l));
            if (of_device) join(own.of[Facts::FOR_ALL], own.of[Facts::FOR_BLOCK]);
            own.version = ++versions;
        });
        ++now;
    }

    void learn(const Warp& w, int lane, const Blocks& told) {
        Facts& own = facts_of(w.block.knowledge[w.thread(lane)]);
        join(own.of[Facts::LEARNT], told);
        own.version = ++versions;
    }

    void learn(const Warp& w, int lane, uint64_t address) {
        if (!facts) return;
        for (int all = 0; all < 2; ++all) {
            const auto found = told[all].find(key(w, address, all));
            if (found != told[all].end()) learn(w, lane, found->second);
        }
    }

    void tell(Warp& w, int lane, uint64_t address, bool instead) {
        if (!facts) return;
        const Thread& self = w.block.knowledge[w.thread(lane)];
        for (int all = 0; all < 2; ++all) {
            if (instead) told[all].erase(key(w, address, all));
            if (self.facts && !self.facts->of[Facts::FOR_BLOCK + all].empty()) {
                join(told[all][key(w, address, all)], self.facts->of[Facts::FOR_BLOCK + all]);
            }
        }
    }

    // Facts of an address for threads of a block are kept by block; of shared memory all are.
    static uint64_t key(const Warp& w, uint64_t address, int all) {
        const bool shared = address >> ARRAY_SHIFT == 1;
        return address + (!all || shared ? (uint64_t)(w.block.number + 1) << 48 : 0);
    }

    // Lets threads know what any of them knows. each: calls a function for each thread.
    template <typename Each>
    void merge(Each each) {
        uint64_t first = ~0ull, last = 0;
        each([&](const Thread& thread) {
            const uint64_t version = thread.facts ? thread.facts->version : 0;
            first = std::min(first, version), last = std::max(last, version);
        });
        if (first >= last) return;  // as in most exchanges
        Facts common;
        each([&](const Thread& thread) { if (thread.facts) common.join(*thread.facts); });
        ++versions;
        each([&](Thread& thread) { facts_of(thread).join(common, versions); });
    }

    void barrier_opens(Block& block) {  // for all threads
        block.phase = now++;
        if (!facts) return;
        for (const Thread& thread : block.knowledge) report_held(thread);
        merge([&](auto f) { std::for_each(block.knowledge.begin(), block.knowledge.end(), f); });
    }

    // Orders the threads that have arrived at a named barrier before those that wait at it.
    void meet(Block& block, const std::vector<int>& arrive, const std::vector<int>& wait) {
        facts = true;
        Facts common;
        for (int number : arrive) {
            Warp& w = block.warps[number / LANES];
            report_held(block.knowledge[number]);
            if (block.knowledge[number].facts) common.join(*block.knowledge[number].facts);
            join(common.of[Facts::LEARNT], knowledge(w, number % LANES));
        }
        for (int number : wait) facts_of(block.knowledge[number]).join(common, ++versions);
        ++now;
    }

    void lanes_meet(Warp& w, Mask lanes) {
        if ((lanes & w.exist) == w.exist) {
            w.met = now++;
        } else {
            uint32_t joined[LANES] = {};
            for_lanes(lanes, [&](int l) {
                const std::vector<uint32_t>& of = w.block.knowledge[w.thread(l)].of;
                for (int k = 0; k < LANES && !of.empty(); ++k) joined[k] = std::max(joined[k], of[k]);
            });
            for_lanes(lanes, [&](int l) { joined[l] = now; });
            for_lanes(lanes, [&](int l) { w.block.knowledge[w.thread(l)].of.assign(joined, joined + LANES); });
            ++now;
        }
        if (!facts) return;
        merge([&](auto f) { for_lanes(lanes & w.exist, [&](int l) { f(w.block.knowledge[w.thread(l)]); }); });
    }

    void thread_ends(Warp& w, int lane) { report_held(w.block.knowledge[w.thread(lane)]); }
};
