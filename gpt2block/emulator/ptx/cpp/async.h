// Copies that proceed beside the threads, the barriers at which they arrive, and clusters.
//
// A copy lands as late as its kernel permits: when a thread waits for it. Until then its destination counts as
// unwritten and holds bytes of 0xff; its source is read when it lands. A copy touches memory twice in the eyes of the
// race detector, when it is issued and when it lands, both times as the thread that issued it. A store of the copy
// engine reads shared memory when the thread waits for this, and writes global memory when the thread waits for that,
// or when its block ends.
#pragma once
#include "counters.h"

namespace async {

constexpr uint64_t OFFSET = (1u << RANK_SHIFT) - 1;  // bits of an address in the shared memory of a block

using memory::touch_once;

struct Copy {  // between a range of shared memory and runs of bytes elsewhere, by a lane
    struct Run {
        uint64_t address;
        unsigned at, bytes;  // at: in the range; what no run covers are zeros
    };
    Warp* w;
    const Instr* i;
    int lane;
    bool to_shared = true;
    uint64_t shared = 0;
    unsigned bytes = 0, swizzle = 0;
    unsigned align = 16, run_align = 16;  // of the range, of each run
    Space space = Space::cluster, other = Space::global;  // of the range, of the runs
    std::vector<Run> runs = {};
    std::vector<uint8_t> data = {};  // on their way

    // Copies bytes of the range, whose units of 16 bytes may be swizzled, to or from bytes in order.
    void each_unit(uint8_t* range, uint8_t* linear, bool out) const {
        const unsigned unit = swizzle ? 16 : bytes;
        const uint64_t start = shared & OFFSET;
        for (unsigned at = 0; at < bytes; at += unit) {
            const uint64_t place = start + at, moved = swizzle ? place ^ (place >> 3 & (swizzle - 16)) : place;
            uint8_t* there = range + (int64_t)(moved - start);
            out ? std::memcpy(there, linear + at, unit) : std::memcpy(linear + at, there, unit);
        }
    }
    uint8_t* touch_shared(unsigned use) const { return touch_once(*w, *i, lane, shared, bytes, space, use, align); }
    uint8_t* touch_run(const Run& run, unsigned use) const {
        return touch_once(*w, *i, lane, run.address, run.bytes, other, use, run_align);
    }

    void begin() {
        for (const Run& run : runs) {
            touch_run(run, to_shared ? READS : WRITES);
            counters::count_copied(*w, *i, run.bytes);
        }
        uint8_t* range = touch_shared(to_shared ? WRITES : READS);
        if (!to_shared) return;
        std::memset(range, 0xff, bytes);
        const uint64_t address = memory::generic_address(*w, lane, shared, space);
        const memory::Region region = memory::find(*w, *i, lane, address, space);
        if (region.written) std::memset(region.written + (range - region.data), 0, bytes);
    }
    void land() {
        if (data.empty()) data.assign(bytes, 0);
        for (const Run& run : runs) std::memcpy(data.data() + run.at, touch_run(run, READS), run.bytes);
        each_unit(touch_shared(WRITES), data.data(), true);
    }
    void take() {
        if (!data.empty()) return;
        data.resize(bytes);
        each_unit(touch_shared(READS), data.data(), false);
    }
    void put() {
        take();
        for (const Run& run : runs) std::memcpy(touch_run(run, WRITES), data.data() + run.at, run.bytes);
    }
};

template <class T>
struct Groups {  // what a thread or a warp has in flight, in groups
    uint32_t group = 0;
    std::deque<std::pair<uint32_t, T>> items;

    void add(T&& item) { items.emplace_back(group, std::move(item)); }

    // Calls act for the items of all committed groups but the most recent `later`.
    template <class Act>
    void each_before(uint32_t later, Act act) {
        for (auto& [number, item] : items) {
            if (number + later < group) act(item);
        }
    }
    void drop_before(uint32_t later) {
        while (!items.empty() && items.front().first + later < group) items.pop_front();
    }
};

struct Deferred {  // what arrives at a barrier when its copies land
    std::vector<Copy> copies;
    int64_t bytes;
    bool arrival;  // also counts as an arrival of the thread
    Warp* w;
    int lane;
};

struct Waiting {  // at an mbarrier
    std::deque<Deferred> deferred;
    int arrivals = 0;  // among the deferred
    Blocks told[2];    // by parity of the phase: what its arrivals make known
};

struct Product {  // of matrices by a warpgroup, which reads shared memory until the wait for it
    const Instr* i;
    std::vector<uint32_t> units;  // addresses of 16 bytes
};

}  // namespace async

struct AsyncBlock {
    struct OfThread {
        async::Groups<async::Copy> copies, stores;
        uint32_t cluster_arrivals = 0;  // at the barrier of the cluster
    };
    struct OfWarp {
        async::Groups<async::Product> products;
        const Instr* tried = nullptr;  // the last mbarrier.try_wait, and how often it has failed since
        int tries = 0;
    };
    std::vector<OfThread> threads;
    std::vector<OfWarp> warps;
    std::unordered_map<uint32_t, async::Waiting> barriers;  // by offset in shared memory
    // In the first block of a cluster:
    uint32_t cluster_phase = 0;  // phases of its barrier that have ended
    Blocks cluster_told[2];

    explicit AsyncBlock(Block& b) : threads(b.threads()), warps(b.warps.size()) {}
};

namespace async {

inline AsyncBlock& of(Block& block) {
    if (!block.async) block.async = std::make_shared<AsyncBlock>(block);
    return *block.async;
}
inline AsyncBlock::OfThread& of(const Warp& w, int lane) { return of(w.block).threads[w.thread(lane)]; }
inline AsyncBlock::OfWarp& of(const Warp& w) { return of(w.block).warps[w.first / LANES]; }

// A block has ended: stores of TMA complete.
inline void finish(Block& block) {
    if (!block.async) return;
    Machine& m = block.machine;
    const auto note = [&](const Warp& w, const Instr& i, int lane, const char* text) {
        m.note({.kind = "async", .text = text, .now = w.here(i, lane)});
    };
    for (AsyncBlock::OfThread& thread : block.async->threads) {
        for (auto& [group, copy] : thread.stores.items) {
            const char* text = "its block ends before the copy has read shared memory: no wait";
            if (copy.data.empty()) note(*copy.w, *copy.i, copy.lane, text);
            try {
                copy.put();
            } catch (const Finding& found) {
                m.note(found);
            }
        }
    }
    for (const Warp& w : block.warps) {
        for (const auto& [group, product] : of(w).products.items) {
            note(w, *product.i, 0, "a product of matrices without a wait");
        }
    }
}

inline void tell(const Warp& w, int lane, Blocks& told) {
    if (!w.machine.races) return;
    join(told, w.machine.races->knowledge(w, lane));
    ++w.machine.races->now;
}
inline void learn(const Warp& w, int lane, const Blocks& told) {
    if (!w.machine.races) return;
    w.machine.races->facts = true;
    w.machine.races->learn(w, lane, told);
}

static void wait_for_previous(Warp& w, const Instr&, Mask active) { w.waited |= active, w.block.waited = true; }

// --- cp.async: copies of 4, 8 or 16 bytes by each thread. to, from, bytes, then perhaps the bytes to read, or a
// predicate that nothing is read

static void copy(Warp& w, const Instr& i, Mask active) {
    const int count = i.count - (i.form->has("L2::cache_hint") ? 1 : 0);
    for_lanes(active, [&](int l) {
        const unsigned bytes = (unsigned)w.in(i, 2)[l];
        unsigned reads = bytes;
        if (count > 3 && i.op[3].kind == Operand::row) reads = std::min(reads, (unsigned)w.in(i, 3)[l]);
        else if (count > 3 && w.predicate(i, 3) >> l & 1) reads = 0;
        Copy made{&w, &i, l, true, w.address(i, 0, l), bytes, 0, bytes, bytes, Space::shared};
        if (reads) made.runs.push_back({w.address(i, 1, l), 0, reads});
        made.begin();
        of(w, l).copies.add(std::move(made));
    });
}

// Groups of copies to shared memory, and of stores of TMA, are committed and waited for in the same way.
template <Groups<Copy> AsyncBlock::OfThread::*GROUPS>
static void commit(Warp& w, const Instr&, Mask active) {
    for_lanes(active, [&](int l) { ++(of(w, l).*GROUPS).group; });
}

static void wait_copies(Warp& w, const Instr& i, Mask active) {
    const bool all = i.form->has("wait_all");
    for_lanes(active, [&](int l) {
        Groups<Copy>& copies = of(w, l).copies;
        if (all) ++copies.group;
        const uint32_t later = all ? 0 : (uint32_t)w.in(i, 0)[l];
        copies.each_before(later, [](Copy& copy) { copy.land(); });
        copies.drop_before(later);
    });
}

static void wait_stores(Warp& w, const Instr& i, Mask active) {
    const bool reads = i.form->has("read");
    for_lanes(active, [&](int l) {
        Groups<Copy>& stores = of(w, l).stores;
        const uint32_t later = (uint32_t)w.in(i, 0)[l];
        stores.each_before(later, [&](Copy& copy) { reads ? copy.take() : copy.put(); });
        if (!reads) stores.drop_before(later);
    });
}

// --- mbarriers

struct Word {  // an mbarrier in shared memory. The fill bytes of unwritten memory do not have MARK
    static constexpr unsigned MARK = 2;
    uint64_t pending : 20, expected : 20, phase : 1;
    int64_t bytes : 21;
    uint64_t mark : 2;
};
static_assert(sizeof(Word) == 8);

struct Meeting {
    Word* word;
    Waiting* waiting;

    void settle() {
        if (word->pending || word->bytes) return;
        word->pending = word->expected, word->phase ^= 1;
        waiting->told[word->phase].clear();
    }
    void land_first() {
        Deferred first = std::move(waiting->deferred.front());
        waiting->deferred.pop_front();
        for (Copy& copy : first.copies) copy.land();
        tell(*first.w, first.lane, waiting->told[word->phase]);
        word->bytes -= first.bytes;
        if (first.arrival) --word->pending, --waiting->arrivals;
        settle();
    }
    // Returns whether the phase of a parity has ended. What is still on its way lands if it can end it.
    bool ended(unsigned parity) {
        const auto can_end = [&] { return !waiting->deferred.empty() && (int)word->pending <= waiting->arrivals; };
        while (word->phase == parity && can_end()) land_first();
        return word->phase != parity;
    }
};

inline Waiting& waiting_at(const Warp& w, uint64_t address, Space space) {
    const uint64_t low = space == Space::generic ? address & ((1ull << ARRAY_SHIFT) - 1) : (uint32_t)address;
    const uint64_t rank = low >> RANK_SHIFT;
    Block& owner = rank && rank <= w.block.cluster.size() ? *w.block.cluster[rank - 1] : w.block;
    return of(owner).barriers[(uint32_t)(low & OFFSET)];
}

inline Meeting meeting(Warp& w, const Instr& i, int lane, uint64_t address, Space space) {
    uint8_t* at = touch_once(w, i, lane, address, 8, space, READS | WRITES | STRONG | ATOMIC, 8);
    Word* word = reinterpret_cast<Word*>(at);
    if (word->mark != Word::MARK) w.machine.fail(w, i, lane, "barrier", "the mbarrier object is not initialised");
    return {word, &waiting_at(w, address, space)};
}

static void init_barrier(Warp& w, const Instr& i, Mask active) {
    const Space space = i.form->space;
    for_lanes(active, [&](int l) {
        const uint64_t address = w.address(i, 0, l), count = (uint32_t)w.in(i, 1)[l];
        if (count == 0 || count >= 1u << 20) {
            w.machine.fail(w, i, l, "barrier", "the count of an mbarrier is from 1 to 2^20 - 1");
        }
        const Word word = {count, count, 0, 0, Word::MARK};
        std::memcpy(touch_once(w, i, l, address, 8, space, WRITES, 8), &word, sizeof word);
        waiting_at(w, address, space) = Waiting();
    });
}

static void end_barrier(Warp& w, const Instr& i, Mask active) {
    const Space space = i.form->space;
    for_lanes(active, [&](int l) { meeting(w, i, l, w.address(i, 0, l), space).word->mark = 0; });
}

// Arrives `count` times and expects more bytes. Returns the state before: the phase.
inline uint64_t arrive_at(Warp& w, const Instr& i, int lane, uint64_t address, unsigned count, int64_t bytes,
                          bool drops) {
    const Meeting at = meeting(w, i, lane, address, i.form->space);
    const uint64_t phase = at.word->phase;
    if (count > at.word->pending) w.machine.fail(w, i, lane, "barrier", "more arrivals at an mbarrier than its count");
    if (count) tell(w, lane, at.waiting->told[phase]);
    at.word->pending -= count, at.word->bytes += bytes;
    if (drops) at.word->expected -= count;
    Meeting(at).settle();
    return phase;
}

// state or _ or nothing, address, count or bytes
static void arrive(Warp& w, const Instr& i, Mask active) {
    const Form& f = *i.form;
    const int where = i.op[0].kind == Operand::address ? 0 : 1;
    const bool expects = f.has("expect_tx"), completes = f.has("complete_tx");
    const bool drops = f.has("arrive_drop"), arrives = drops || f.has("arrive");
    for_lanes(active, [&](int l) {
        const uint32_t given = i.count > where + 1 ? (uint32_t)w.in(i, where + 1)[l] : 1;
        const int64_t bytes = expects ? given : completes ? -(int64_t)given : 0;
        const unsigned count = !arrives ? 0 : expects ? 1 : given;
        const uint64_t state = arrive_at(w, i, l, w.address(i, where, l), count, bytes, drops);
        if (where && i.op[0].kind == Operand::row) w.out(i, 0)[l] = state;
    });
}

constexpr int TRIES = 8;  // failures of mbarrier.try_wait in turn before the lanes stop until others proceed

// p, address, parity or state
static void test_wait(Warp& w, const Instr& i, Mask active) {
    Mask ended = 0;
    for_lanes(active, [&](int l) {
        Meeting at = meeting(w, i, l, w.address(i, 1, l), i.form->space);
        const unsigned parity = w.in(i, 2)[l] & 1;
        if (!at.ended(parity)) return;
        learn(w, l, at.waiting->told[parity]);
        ended |= 1u << l;
    });
    w.set_predicate(i, 0, active, ended);
    AsyncBlock::OfWarp& own = of(w);
    own.tries = ended == active || own.tried != &i ? 0 : own.tries + 1;
    own.tried = &i;
    if (ended == active) return;
    if (i.form->has("try_wait") && own.tries > TRIES) w.again(active & ~ended);
    w.yields = true;
}

// All earlier cp.async of the thread arrive with this arrival.
static void arrive_with_copies(Warp& w, const Instr& i, Mask active) {
    const Space space = i.form->space;
    for_lanes(active, [&](int l) {
        Meeting at = meeting(w, i, l, w.address(i, 0, l), space);
        if (!i.form->has("noinc")) ++at.word->pending;
        Deferred made{{}, 0, true, &w, l};
        auto& copies = of(w, l).copies.items;
        for (auto& each : copies) made.copies.push_back(std::move(each.second));
        copies.clear();
        at.waiting->deferred.push_back(std::move(made));
        ++at.waiting->arrivals;
    });
}

// --- TMA: bulk copies, and boxes of tensors

struct Map {  // a tensor map as gpt2block/emulator/ptx/tensor_maps.py encodes it; dimension 0 is contiguous
    uint64_t address;
    uint32_t rank, item, swizzle, unused;
    uint64_t strides[5];  // bytes; the first is `item`
    uint32_t sizes[5], box[5];
};
static_assert(sizeof(Map) <= 128);

inline void add_box(Warp& w, const Instr& i, int lane, int where, Copy& copy) {
    Map map;
    std::memcpy(&map, touch_once(w, i, lane, w.address(i, where, lane), 128, Space::generic, READS, 64), sizeof map);
    const uint32_t rank = i.op[where + 1].count;
    if (map.rank != rank) w.machine.fail(w, i, lane, "async", "the tensor map has another rank");
    copy.swizzle = map.swizzle, copy.bytes = map.item, copy.align = 128, copy.run_align = map.item;
    int64_t corner[5] = {};
    uint32_t rows = 1;
    for (uint32_t d = 0; d < map.rank; ++d) {
        corner[d] = (int32_t)w.in(i, where + 1, (int)d)[lane];
        copy.bytes *= map.box[d];
        if (d) rows *= map.box[d];
    }
    const int64_t first = std::max<int64_t>(corner[0], 0);
    const int64_t last = std::min<int64_t>(corner[0] + map.box[0], map.sizes[0]);
    for (uint32_t row = 0; row < rows && first < last; ++row) {
        uint64_t address = map.address + first * map.item;
        uint32_t rest = row;
        bool inside = true;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t at = corner[d] + rest % map.box[d];
            rest /= map.box[d];
            inside &= at >= 0 && at < (int64_t)map.sizes[d];
            address += at * map.strides[d];
        }
        const unsigned start = (row * map.box[0] + (unsigned)(first - corner[0])) * map.item;
        if (inside) copy.runs.push_back({address, start, (unsigned)(last - first) * map.item});
    }
}

// A copy lands at a barrier of its destination's block. rank: of this block, + 1; 0: as the addresses say.
inline void send(Warp& w, const Instr& i, Copy copy, uint64_t barrier, uint64_t rank = 0) {
    if (rank) {
        copy.shared = (copy.shared & OFFSET) | rank << RANK_SHIFT;
        barrier = (barrier & OFFSET) | rank << RANK_SHIFT;
    }
    const int lane = copy.lane;
    const int64_t bytes = copy.bytes;
    const Meeting there = meeting(w, i, lane, barrier, Space::cluster);
    if (copy.data.empty()) copy.begin();
    there.waiting->deferred.push_back({{std::move(copy)}, bytes, false, &w, lane});
}

// to, from, bytes, barrier, mask; or of tensors: to, map, corner, barrier, mask
static void bulk_load(Warp& w, const Instr& i, Mask active) {
    const Form& f = *i.form;
    for_lanes(active, [&](int l) {
        Copy made{&w, &i, l, true, (uint32_t)w.address(i, 0, l)};
        if (f.has("tensor")) {
            add_box(w, i, l, 1, made);
        } else {
            made.bytes = (unsigned)w.in(i, 2)[l];
            const char* odd_size = "the size of a bulk copy is no multiple of 16 bytes";
            if (made.bytes % 16) w.machine.fail(w, i, l, "misaligned", odd_size);
            if (!f.has("global")) made.other = Space::shared;  // between blocks
            made.runs.push_back({w.address(i, 1, l), 0, made.bytes});
        }
        const uint64_t barrier = (uint32_t)w.address(i, 3, l);
        if (!f.has("multicast::cluster")) return send(w, i, made, barrier);
        const uint64_t blocks = w.in(i, 4)[l] & 0xffff;
        const char* absent = "the mask names a block that the cluster does not have";
        if (blocks >> w.block.cluster.size()) w.machine.fail(w, i, l, "async", absent);
        for (uint64_t rank = 0; rank < 16; ++rank) {
            if (blocks >> rank & 1) send(w, i, made, barrier, rank + 1);
        }
    });
}

// to, from, bytes; or of tensors: map, corner, from
static void bulk_store(Warp& w, const Instr& i, Mask active) {
    const bool tensor = i.form->has("tensor");
    for_lanes(active, [&](int l) {
        Copy made{&w, &i, l, false, w.address(i, tensor ? 2 : 1, l)};
        made.space = Space::shared;
        if (tensor) {
            add_box(w, i, l, 0, made);
        } else {
            made.bytes = (unsigned)w.in(i, 2)[l];
            made.runs.push_back({w.address(i, 0, l), 0, made.bytes});
        }
        made.begin();
        of(w, l).stores.add(std::move(made));
    });
}

// st.async: address, values, barrier
static void store(Warp& w, const Instr& i, Mask active) {
    const unsigned size = i.form->type().bits / 8, bytes = size * (unsigned)i.op[1].count;
    for_lanes(active, [&](int l) {
        Copy made{&w, &i, l, true, (uint32_t)w.address(i, 0, l), bytes, 0, bytes};
        made.begin();
        made.data.resize(bytes);
        for (int k = 0; k < i.op[1].count; ++k) std::memcpy(made.data.data() + k * size, w.in(i, 1, k) + l, size);
        send(w, i, std::move(made), w.address(i, 2, l));
    });
}

// --- clusters

static void mapa(Warp& w, const Instr& i, Mask active) {
    for_lanes(active, [&](int l) {
        const uint64_t rank = (uint32_t)w.in(i, 2)[l];
        const char* absent = "the cluster does not have this block";
        if (rank >= w.block.cluster.size()) w.machine.fail(w, i, l, "out of bounds", absent);
        w.out(i, 0)[l] = (w.in(i, 1)[l] & ~(0xffull << RANK_SHIFT)) | (rank + 1) << RANK_SHIFT;
    });
}

static void getctarank(Warp& w, const Instr& i, Mask active) {
    for_lanes(active, [&](int l) {
        const uint64_t rank = w.in(i, 1)[l] >> RANK_SHIFT & 0xff;
        w.out(i, 0)[l] = rank ? rank - 1 : (uint64_t)w.block.rank;
    });
}

static void arrive_in_cluster(Warp& w, const Instr& i, Mask active) {
    AsyncBlock& cluster = of(*w.block.cluster[0]);
    for_lanes(active, [&](int l) {
        Blocks& told = cluster.cluster_told[of(w, l).cluster_arrivals++ & 1];
        if (!i.form->has("relaxed")) return tell(w, l, told);
        const Thread& own = w.block.knowledge[w.thread(l)];
        if (own.facts) join(told, own.facts->of[Facts::FOR_ALL]);  // what its fences make visible
    });
}

// Whether all threads of a cluster have arrived in the current phase. Threads that have returned count as arrived.
inline bool all_arrived(const std::vector<Block*>& blocks, uint32_t phase) {
    for (Block* block : blocks) {
        const AsyncBlock& own = of(*block);
        for (const Warp& w : block->warps) {
            for (int l = 0; l < LANES; ++l) {
                if (w.state[l] == Lane::done) continue;
                if (own.threads[w.thread(l)].cluster_arrivals <= phase) return false;
            }
        }
    }
    return true;
}

static void wait_for_cluster(Warp& w, const Instr&, Mask active) {
    AsyncBlock& cluster = of(*w.block.cluster[0]);
    for_lanes(active, [&](int l) {
        const uint32_t awaited = of(w, l).cluster_arrivals;  // phases that must have ended
        if (cluster.cluster_phase < awaited) {
            if (!all_arrived(w.block.cluster, cluster.cluster_phase)) return w.again(1u << l);
            cluster.cluster_told[++cluster.cluster_phase & 1].clear();
        }
        learn(w, l, cluster.cluster_told[(awaited - 1) & 1]);
    });
}

// --- one lane of a mask: the first

static void elect(Warp& w, const Instr& i, Mask active) {
    const Mask mask = (Mask)w.in(i, i.count - 1)[__builtin_ctz(active)];
    const int leader = __builtin_ctz(mask & active);
    if (i.op[0].kind == Operand::row) for_lanes(active, [&](int l) { w.out(i, 0)[l] = (uint32_t)leader; });
    w.set_predicate(i, 1, active, 1u << leader);
}

static const Rows rows_{
    {"cp.async.shared cp.async.shared::cta", copy},
    {"cp.async.commit_group", commit<&AsyncBlock::OfThread::copies>},
    {"cp.async.wait_group cp.async.wait_all", wait_copies},
    {"cp.async.mbarrier.arrive", arrive_with_copies},
    {"cp.async.bulk.mbarrier::complete_tx::bytes", bulk_load},
    {"cp.async.bulk.bulk_group", bulk_store},
    {"cp.async.bulk.commit_group", commit<&AsyncBlock::OfThread::stores>},
    {"cp.async.bulk.wait_group", wait_stores},
    {"cp.async.bulk.prefetch", nothing},
    {"mbarrier.init", init_barrier},
    {"mbarrier.inval", end_barrier},
    {"mbarrier.test_wait mbarrier.try_wait", test_wait},
    {"mbarrier.arrive mbarrier.arrive_drop mbarrier.expect_tx mbarrier.complete_tx", arrive},
    {"st.async", store},
    {"mapa", mapa},
    {"getctarank", getctarank},
    {"barrier.cluster.arrive", arrive_in_cluster},
    {"barrier.cluster.wait", wait_for_cluster},
    {"fence.proxy setmaxnreg griddepcontrol.launch_dependents", nothing},
    {"griddepcontrol.wait", wait_for_previous},
    {"elect", elect, LAST},
};

}  // namespace async
