// Runs a launch: blocks, the turns of their warps, groups of lanes, barriers, and lanes that wait for one another.
//
// A warp executes the ready lanes with the lowest pc as one group, which brings lanes together again after a branch, as
// compilers put the common successor last. A group that has jumped back LOOPS times while other lanes are ready gives
// way to them, so that a lane can wait in a loop for another lane of its warp.
#pragma once
#include "async.h"

#include <numeric>
#include <random>

namespace schedule {

constexpr int LOOPS = 64;
constexpr int64_t TURN = 4096;           // warp instructions of a warp before the next has its turn
constexpr int64_t BLOCK_TURN = 1 << 18;  // of a block, before another block starts beside it
constexpr int64_t SHORT_TURN = 24;       // of a warp if blocks are interleaved
constexpr std::size_t INTERLEAVED = 6;   // blocks in flight then
constexpr std::size_t MAX_IN_FLIGHT = 512;
constexpr std::size_t MAX_CALLS = 1000;

// Special registers, which stay the same while a warp runs. k: the axis of those with .x, .y or .z.
using Special = uint64_t (*)(const Warp& w, int lane, int k);

inline uint64_t thread_id(const Warp& w, int lane, int k) {
    const std::array<uint32_t, 3>& size = w.machine.block;
    const uint32_t t = w.thread(lane);
    return k == 0 ? t % size[0] : k == 1 ? t / size[0] % size[1] : t / size[0] / size[1];
}
inline uint64_t warp_id(const Warp& w, int, int) {
    const int number = w.first / LANES, last = (w.block.threads() - 1) / LANES;
    return w.machine.variant % 2 ? last - number : number;
}

inline const std::unordered_map<std::string, Special>& specials() {
    static const std::unordered_map<std::string, Special> all = {
        {"%tid", thread_id},
        {"%ntid", [](auto& w, int, int k) -> uint64_t { return w.machine.block[k]; }},
        {"%ctaid", [](auto& w, int, int k) -> uint64_t { return w.block.id[k]; }},
        {"%nctaid", [](auto& w, int, int k) -> uint64_t { return w.machine.grid[k]; }},
        {"%clusterid", [](auto& w, int, int k) -> uint64_t { return w.block.id[k] / w.machine.cluster[k]; }},
        {"%nclusterid", [](auto& w, int, int k) -> uint64_t { return w.machine.grid[k] / w.machine.cluster[k]; }},
        {"%cluster_ctaid", [](auto& w, int, int k) -> uint64_t { return w.block.id[k] % w.machine.cluster[k]; }},
        {"%cluster_nctaid", [](auto& w, int, int k) -> uint64_t { return w.machine.cluster[k]; }},
        {"%cluster_ctarank", [](auto& w, int, int) -> uint64_t { return w.block.rank; }},
        {"%cluster_nctarank", [](auto& w, int, int) -> uint64_t { return w.block.cluster_size(); }},
        {"%is_explicit_cluster", [](auto& w, int, int) -> uint64_t { return w.block.cluster_size() > 1; }},
        {"%laneid", [](auto&, int lane, int) -> uint64_t { return lane; }},
        {"%warpid", warp_id},
        {"%nwarpid", [](auto&, int, int) -> uint64_t { return 64; }},
        {"%smid", [](auto& w, int, int) -> uint64_t { return w.machine.variant % 2 ? 7 : w.block.number % 108; }},
        {"%nsmid", [](auto& w, int, int) -> uint64_t { return w.machine.variant % 2 ? 132 : 108; }},
        {"%lanemask_eq", [](auto&, int lane, int) -> uint64_t { return 1u << lane; }},
        {"%lanemask_lt", [](auto&, int lane, int) -> uint64_t { return (1u << lane) - 1; }},
        {"%lanemask_le", [](auto&, int lane, int) -> uint64_t { return (2u << lane) - 1; }},
        {"%lanemask_gt", [](auto&, int lane, int) -> uint64_t { return 0u - (2u << lane); }},
        {"%lanemask_ge", [](auto&, int lane, int) -> uint64_t { return 0u - (1u << lane); }},
        {"%dynamic_smem_size", [](auto& w, int, int) -> uint64_t { return w.machine.dynamic_bytes; }},
        {"%total_smem_size", [](auto& w, int, int) -> uint64_t { return w.block.shared.size(); }},
        {"%gridid", [](auto&, int, int) -> uint64_t { return 1; }},
    };
    return all;
}

struct Run {
    Machine& m;
    const Program& p;
    std::mt19937 random{20240229};
    int64_t started = 0, clusters = 0;
    std::vector<int64_t> order;  // of clusters

    explicit Run(Machine& machine) : m(machine), p(*machine.program) {}

    // --- lanes

    Access here(const Warp& w, int lane) const { return w.here(p.code[w.pc[lane]], lane); }

    static Mask in_state(const Warp& w, Lane state) {
        return lanes_where(~0u, [&](int l) { return w.state[l] == state; });
    }

    static Mask at_pc(const Warp& w, Mask lanes, uint32_t pc) {
        return lanes_where(lanes, [&](int l) { return w.pc[l] == pc; });
    }

    void end_lanes(Warp& w, Mask lanes, uint32_t pc) {
        for_lanes(lanes, [&](int l) {
            w.state[l] = Lane::done, w.pc[l] = pc;
            if (m.trace) m.trace->each(w, p.code[pc], 1u << l, "returns");
            if (--w.block.alive == 0 && m.early && !w.block.waited) {
                m.fail(w, p.code[pc], l, "before the wait", "no thread of the block waits for the previous kernel");
            }
            if (m.races) m.races->thread_ends(w, l);
        });
        for_lanes(in_state(w, Lane::gathers), [&](int l) {
            if (w.mask[l] & lanes) absent(w, l, __builtin_ctz(w.mask[l] & lanes));
        });
    }

    [[noreturn]] void absent(const Warp& w, int waits, int gone) const {
        throw Finding{.kind = "mask", .text = "the mask names the lane of a thread that has returned",
                      .now = here(w, waits), .other = here(w, gone)};
    }

    // The mask of lanes that must come together at an instruction, for a lane.
    Mask mask_of(const Warp& w, const Instr& i, int lane) const {
        if (i.form->gathers == WHOLE_WARP) return w.exist;
        return (Mask)w.in(i, i.form->gathers == LAST ? i.count - 1 : i.form->gathers)[lane];
    }

    void run_gathered(Warp& w, const Instr& i, Mask lanes) {
        if (m.races) m.races->lanes_meet(w, lanes);
        i.run(w, i, lanes);
        if (m.trace) for_lanes(lanes, [&](int l) { m.trace->receives(w, i, l); });
        // The warp as a whole has then read: every lane knows the reads of the others. Stores are not ordered.
        if (m.races && i.form->gathers == WHOLE_WARP && !i.form->stores) m.races->lanes_meet(w, lanes);
    }

    // Lanes arrive at an instruction of several lanes. Returns whether the whole group has executed it, as is usual.
    bool gather(Warp& w, const Instr& i, uint32_t pc, Mask active) {
        const int first = __builtin_ctz(active);
        const Mask mask = mask_of(w, i, first);
        bool same = (mask & w.exist) == active;
        if (same && i.form->gathers != WHOLE_WARP) for_lanes(active, [&](int l) { same &= mask_of(w, i, l) == mask; });
        if (m.trace) for_lanes(active, [&](int l) { m.trace->arrives(w, i, l, mask_of(w, i, l)); });
        if (same) return run_gathered(w, i, active), true;
        for_lanes(active, [&](int l) {
            w.state[l] = Lane::gathers, w.pc[l] = pc, w.mask[l] = mask_of(w, i, l) & w.exist;
            const char* absent = "the mask does not name the lane that executes the instruction";
            if (!(w.mask[l] >> l & 1)) m.fail(w, i, l, "mask", absent);
        });
        for_lanes(active, [&](int l) {
            const Mask gone = w.mask[l] & in_state(w, Lane::done);
            if (gone) absent(w, l, __builtin_ctz(gone));
        });
        for (Mask rest = active; rest;) {
            const Mask group = w.mask[__builtin_ctz(rest)];
            release(w, group);
            rest &= ~group;
        }
        return false;
    }

    // Lets the lanes of a mask execute their instruction, if all of them have arrived at one.
    void release(Warp& w, Mask group) {
        const Instr* one = nullptr;
        bool ready = true;
        for_lanes(group, [&](int l) {
            const Instr& i = p.code[w.pc[l]];
            ready &= w.state[l] == Lane::gathers && w.mask[l] == group && (!one || one->form == i.form);
            if (ready && !one) one = &i;
        });
        if (!ready) return;
        bool together = true;
        for_lanes(group, [&](int l) { together &= &p.code[w.pc[l]] == one; });
        together ? run_gathered(w, *one, group) : run_apart(w, *one, group);
        for_lanes(group, [&](int l) { w.state[l] = Lane::runs, ++w.pc[l]; });
    }

    // Lanes at several places execute the same form, each with its own operands: in turn for the lanes of each place,
    // with the values of the others put into the registers that this place reads.
    void run_apart(Warp& w, const Instr& one, Mask group) {
        const std::vector<uint64_t> rows = w.rows;
        const std::vector<Mask> predicates = w.predicates;
        std::vector<uint64_t> result = rows;
        std::vector<Mask> truths = predicates;
        if (m.races) m.races->lanes_meet(w, group);
        for (Mask rest = group; rest;) {
            const uint32_t pc = w.pc[__builtin_ctz(rest)];
            const Instr& here = p.code[pc];
            const Mask lanes = at_pc(w, group, pc);
            w.rows = rows, w.predicates = predicates;
            for_lanes(group & ~lanes, [&](int l) {
                for (int k = 0; k < one.count; ++k) copy_operand(w, here, p.code[w.pc[l]], k, l, rows, predicates);
            });
            here.run(w, here, group);
            for (std::size_t r = 0; r < rows.size(); r += LANES) {
                for_lanes(lanes, [&](int l) { result[r + l] = w.rows[r + l]; });
            }
            for (std::size_t k = 0; k < truths.size(); ++k) {
                truths[k] = (truths[k] & ~lanes) | (w.predicates[k] & lanes);
            }
            rest &= ~lanes;
        }
        w.rows = result, w.predicates = truths;
        if (m.trace) for_lanes(group, [&](int l) { m.trace->receives(w, p.code[w.pc[l]], l); });
    }

    void copy_operand(Warp& w, const Instr& to, const Instr& from, int k, int lane, const std::vector<uint64_t>& rows,
                      const std::vector<Mask>& predicates) {
        const Operand &a = to.op[k], &b = from.op[k];
        if (a.kind == Operand::row && a.index >= 0 && a.count == 1) {
            w.rows[a.index * LANES + lane] = b.index < 0 ? w.in(from, k)[lane] : rows[b.index * LANES + lane];
        } else if (a.kind == Operand::predicate || a.kind == Operand::not_predicate) {
            const bool value = (predicates[b.index] >> lane & 1) != (a.kind != b.kind);
            w.predicates[a.index] = (w.predicates[a.index] & ~(1u << lane)) | (Mask)value << lane;
        }
    }

    // --- barriers of a block

    void arrive(Warp& w, const Instr& i, uint32_t pc, Mask active) {
        const Form& f = *i.form;
        const bool red = f.has("red");
        const int at = red ? 1 : 0, count = i.count - at - (red ? 1 : 0);
        const int lane = __builtin_ctz(active), number = (int)w.in(i, at)[lane] & 15;
        const int expected = count > 1 ? (int)w.in(i, at + 1)[lane] : w.block.threads();
        Barrier& b = w.block.barriers[number];
        if (!b.expected) b.here = w.here(i, lane), b.expected = expected;
        if (b.expected != expected || (count == 1 && b.here.place != w.here(i, lane).place)) {
            const bool same = b.expected == expected;
            const char* numbers = "threads expect different numbers of threads at the barrier";
            throw Finding{.kind = "barrier", .text = same ? "threads wait at different barriers" : numbers,
                          .now = w.here(i, lane), .other = b.here};
        }
        const bool waits = !f.has("arrive");
        if (m.trace) m.trace->each(w, i, active, waits ? "waits at the barrier" : "arrives at the barrier");
        for_lanes(active, [&](int l) {
            if (waits) w.state[l] = Lane::waits;
            w.pc[l] = waits ? pc : pc + 1;
            b.came.push_back(w.thread(l));
        });
        if (!f.has("arrive")) check_aligned(w, i, lane);
        b.arrived += __builtin_popcount(active);
        if (count > 1 && active == w.exist) b.arrived += LANES - __builtin_popcount(w.exist);  // counted in warps
        if (red) b.holds += __builtin_popcount(w.predicate(i, i.count - 1) & active);
        if (b.arrived >= b.expected) open(w.block, b, number);
    }

    // bar.sync is for whole warps: its lanes must not wait at two places.
    void check_aligned(Warp& w, const Instr& i, int lane) const {
        for_lanes(in_state(w, Lane::waits), [&](int l) {
            const Instr& other = p.code[w.pc[l]];
            if (&other == &i || i.form->name != "bar") return;
            const char* of_line = "threads wait at two barriers in one line, or in two calls of a function";
            const char* elsewhere = "threads wait at different barriers";
            throw Finding{.kind = "barrier", .text = other.place == i.place ? of_line : elsewhere,
                          .now = w.here(i, lane), .other = here(w, l)};
        });
    }

    void open(Block& block, Barrier& b, int number) {
        std::vector<int> waiting;
        for (Warp& w : block.warps) {
            if (block.waited) w.waited = w.exist;
            for_lanes(in_state(w, Lane::waits), [&](int l) {
                const Instr& i = p.code[w.pc[l]];
                const bool red = i.form->has("red");
                if (((int)w.in(i, red ? 1 : 0)[l] & 15) != number) return;
                waiting.push_back(w.thread(l));
                if (red) reduce(w, i, l, b);
                if (m.trace) m.trace->each(w, i, 1u << l, "passes the barrier");
                w.state[l] = Lane::runs, ++w.pc[l];
            });
        }
        if (m.races) {
            if ((int)waiting.size() == block.threads()) m.races->barrier_opens(block);
            else m.races->meet(block, b.came, waiting);
        }
        b = Barrier();
    }

    static void reduce(Warp& w, const Instr& i, int lane, const Barrier& b) {
        const Form& f = *i.form;
        if (f.has("popc")) w.out(i, 0)[lane] = (uint32_t)b.holds;
        else w.set_predicate(i, 0, 1u << lane, (f.has("or") ? b.holds > 0 : b.holds == (int)b.came.size()) ? ~0u : 0);
    }

    // --- a warp

    static uint32_t lowest(const Warp& w, Mask lanes) {
        uint32_t pc = ~0u;
        for_lanes(lanes, [&](int l) { pc = std::min(pc, w.pc[l]); });
        return pc;
    }

    void put(Warp& w, Mask lanes, uint32_t pc) const {
        for_lanes(lanes, [&](int l) { w.pc[l] = pc; });
    }

    // Runs a warp for some instructions. Returns whether an instruction was completed.
    bool turn(Warp& w, int64_t quantum) {
        const int64_t until = m.executed + quantum;
        bool progress = false;
        w.repeats = 0, w.yields = false;
        while (m.executed < until) {
            const Mask ready = in_state(w, Lane::runs) & ~w.repeats;
            if (!ready) break;
            const Mask preferred = ready & ~w.gives_way ? ready & ~w.gives_way : ready;
            const uint32_t pc = lowest(w, preferred);
            const Mask group = at_pc(w, ready, pc);
            w.gives_way = 0;
            progress |= run_group(w, pc, group, ready & ~group, until);
            if (w.yields && group == ready) break;
        }
        return progress;
    }

    // Executes a group until it ends, splits, waits, meets other lanes or has to give way.
    bool run_group(Warp& w, uint32_t pc, Mask group, Mask others, int64_t until) {
        const Instr* code = p.code.data();
        const uint32_t next = others ? lowest(w, others) : ~0u;
        const int64_t before = m.executed;
        int loops = 0;
        w.yields = false;
        while (true) {
            const Instr& i = code[pc];
            Mask active = group;
            if (i.guard >= 0) active &= i.guard_not ? ~w.predicates[i.guard] : w.predicates[i.guard];
            ++m.executed;
            if (m.counts) counters::count(w, i, group, active);
            if (!active) {
                ++pc;
            } else if (i.form->control == Control::branch) {
                const uint32_t target = (uint32_t)i.op[0].index;
                if (active != group) return put(w, active, target), put(w, group & ~active, pc + 1), true;
                if (target <= pc && (others || m.executed > until)) {
                    if (++loops >= LOOPS) w.gives_way = group, until = 0;
                }
                pc = target;
            } else if (i.form->control != Control::none) {
                return put(w, group & ~active, pc + 1), control(w, i, pc, active), true;
            } else if (i.form->gathers != NO_LANES) {
                if (!gather(w, i, pc, active)) return put(w, group & ~active, pc + 1), true;
                ++pc;
            } else {
                i.run(w, i, active);
                if (m.trace) m.trace->settle();
                if (w.repeats & group) {
                    put(w, w.repeats & group, pc), put(w, group & ~w.repeats, pc + 1);
                    return m.executed - before > 1 || (group & ~w.repeats);
                }
                ++pc;
                if (w.yields) w.gives_way = group, until = 0;
            }
            if (pc == next || (others && pc > next) || m.executed >= until) return put(w, group, pc), true;
        }
    }

    void control(Warp& w, const Instr& i, uint32_t pc, Mask active) {
        switch (i.form->control) {
            case Control::exit: return end_lanes(w, active, pc);
            case Control::barrier: return arrive(w, i, pc, active);
            case Control::call: return for_lanes(active, [&](int l) { call(w, i, pc, l); });
            case Control::ret: return for_lanes(active, [&](int l) { ret(w, i, l); });
            default:  // brx.idx: the index, then the targets
                for_lanes(active, [&](int l) {
                    const uint64_t n = w.in(i, 0)[l];
                    const char* outside = "the index is outside of the table of targets";
                    if (n + 1 >= (uint64_t)i.count) m.fail(w, i, l, "branch", outside);
                    w.pc[l] = (uint32_t)i.op[1 + n].index;
                });
        }
    }

    // Operands: the function or a pointer to it; the row of its return address; if the function may be running already,
    // where in local memory its result lies. All registers and local memory of the thread are then kept until it
    // returns.
    void call(Warp& w, const Instr& i, uint32_t pc, int lane) {
        const bool saves = i.count > 2;
        uint64_t target = (uint64_t)i.op[0].index;
        if (i.op[0].kind == Operand::row) target = w.in(i, 0)[lane] - CODE;
        if (target >= p.code.size()) m.fail(w, i, lane, "branch", "a pointer to a function has another value");
        if (saves) {
            Saved& kept = w.calls[lane].emplace_back();
            for (int r = 0; r < p.rows; ++r) kept.rows.push_back(w.rows[r * LANES + lane]);
            for (Mask each : w.predicates) kept.predicates.push_back(each >> lane & 1);
            const uint8_t* local = w.block.local.data() + (std::size_t)w.thread(lane) * p.local_bytes;
            kept.local.assign(local, local + p.local_bytes);
            kept.result = i.op[2].index, kept.result_bytes = i.op[2].count;
            const char* endless = "functions call themselves without an end";
            if (w.calls[lane].size() > MAX_CALLS) m.fail(w, i, lane, "endless", endless);
        }
        w.rows[i.op[1].index * LANES + lane] = pc + 1 + (saves ? CODE : 0);
        w.pc[lane] = (uint32_t)target;
        if (i.place) w.caller[lane] = pc;
    }

    void ret(Warp& w, const Instr& i, int lane) {
        const uint64_t back = w.in(i, 0)[lane];
        w.pc[lane] = (uint32_t)back;
        if (!(back & CODE)) return;
        Saved& kept = w.calls[lane].back();
        for (int r = 0; r < p.rows; ++r) w.rows[r * LANES + lane] = kept.rows[r];
        for (std::size_t k = 0; k < kept.predicates.size(); ++k) {
            w.predicates[k] = (w.predicates[k] & ~(1u << lane)) | (Mask)kept.predicates[k] << lane;
        }
        uint8_t* local = w.block.local.data() + (std::size_t)w.thread(lane) * p.local_bytes;
        std::copy(local + kept.result, local + kept.result + kept.result_bytes, kept.local.begin() + kept.result);
        std::copy(kept.local.begin(), kept.local.end(), local);
        w.calls[lane].pop_back();
    }

    // --- blocks

    std::unique_ptr<Block> make_block(int64_t number, int rank) {
        auto block = std::make_unique<Block>(m);
        block->number = number, block->rank = rank;
        const int64_t x = m.grid[0], y = m.grid[1];
        block->id = {(uint32_t)(number % x), (uint32_t)(number / x % y), (uint32_t)(number / x / y)};
        const uint8_t fill = m.fill();
        block->shared.assign(p.shared_bytes + m.dynamic_bytes, fill);
        block->written.assign(block->shared.size(), 0);
        for (const auto& [from, to] : p.gaps) std::fill_n(block->written.begin() + from, to - from, memory::GAP);
        const int threads = block->threads();
        block->local.assign((std::size_t)p.local_bytes * threads, fill);
        block->local_written.assign(block->local.size(), 0);
        block->knowledge.resize(threads);
        block->alive = threads;
        const std::size_t cells = block->shared.size() / p.granule + 1;
        if (m.checks) block->shadow = std::make_shared<Shadow>(cells, true, Finding::in_shared);
        for (int first = 0; first < threads; first += LANES) {
            Warp& w = block->warps.emplace_back(m, *block);
            w.first = first;
            w.exist = threads - first >= LANES ? ~0u : (1u << (threads - first)) - 1;
            w.rows.assign((std::size_t)p.rows * LANES, fill * 0x0101010101010101ull);
            w.predicates.assign(p.predicates, 0);
            w.pc.fill(m.entry), w.caller.fill(m.entry);
            for (int l = 0; l < LANES; ++l) w.state[l] = w.exist >> l & 1 ? Lane::runs : Lane::done;
            for (const auto& [row, name] : p.specials) {
                const auto found = specials().find(name.substr(0, name.find('.')));
                uint64_t* to = w.rows.data() + row * LANES;
                const int axis = name.back() - 'x';
                for_lanes(w.exist, [&](int l) { to[l] = found == specials().end() ? 0 : found->second(w, l, axis); });
            }
        }
        return block;
    }

    // Starts the next cluster (a block, if there are none). Returns whether there was one.
    bool start() {
        if (started == clusters) return false;
        const int64_t n = order[started++];
        const std::array<uint32_t, 3>& c = m.cluster;
        const std::array<uint32_t, 3> wide = {m.grid[0] / c[0], m.grid[1] / c[1], m.grid[2] / c[2]};
        const int64_t x = n % wide[0], y = n / wide[0] % wide[1], z = n / wide[0] / wide[1];
        std::vector<Block*> members;
        for (uint32_t k = 0; k < product(c); ++k) {
            const int64_t bx = x * c[0] + k % c[0], by = y * c[1] + k / c[0] % c[1], bz = z * c[2] + k / c[0] / c[1];
            m.in_flight.push_back(make_block(bx + m.grid[0] * (by + (int64_t)m.grid[1] * bz), (int)k));
            members.push_back(m.in_flight.back().get());
        }
        for (Block* block : members) block->cluster = members;
        return true;
    }

    // Gives each warp of a block turns until all wait or the block's turn has ended. Returns whether there was
    // progress.
    bool run_block(Block& block) {
        const bool interleaved = m.order == Order::interleaved;
        const int64_t until = m.executed + (interleaved ? 1 : BLOCK_TURN);
        std::vector<int> turns(block.warps.size());
        std::iota(turns.begin(), turns.end(), 0);
        if (m.order == Order::reverse) std::reverse(turns.begin(), turns.end());
        bool any = false, progress = true;
        while (progress && block.alive && m.executed <= until) {
            if (m.order == Order::shuffled) std::shuffle(turns.begin(), turns.end(), random);
            progress = false;
            for (int k : turns) progress |= turn(block.warps[k], interleaved ? SHORT_TURN : TURN);
            any |= progress;
            if (m.executed > m.budget && block.alive) endless(block);
        }
        return any;
    }

    [[noreturn]] void endless(const Block& block) const {
        Finding found{.kind = "endless", .text = "the kernel does not end: its budget of instructions is used up"};
        for (const Warp& w : block.warps) {
            const Mask runs = in_state(w, Lane::runs), left = w.exist & ~in_state(w, Lane::done);
            if (runs || (left && found.now.thread < 0)) found.now = here(w, __builtin_ctz(runs ? runs : left));
        }
        throw found;
    }

    [[noreturn]] void deadlock() const {
        Finding found{.kind = "barrier", .text = "other threads never reach it"};
        for (const auto& block : m.in_flight) {
            for (const Warp& w : block->warps) {
                for_lanes(w.exist, [&](int l) {
                    const Access at = here(w, l);
                    if (w.state[l] == Lane::done) {
                        if (found.other.thread < 0) found.other = at;
                    } else if (found.now.thread < 0) {
                        found.now = at;
                    } else if (at.place != found.now.place) {
                        found.other = at;
                    }
                });
            }
            if (found.now.thread >= 0) throw found;
        }
        throw found;
    }

    void run() {
        clusters = (int64_t)m.grid[0] * m.grid[1] * m.grid[2] / product(m.cluster);
        for (int64_t k = 0; k < clusters; ++k) order.push_back(m.order == Order::reverse ? clusters - 1 - k : k);
        if (m.order == Order::shuffled) std::shuffle(order.begin(), order.end(), random);
        const std::size_t at_once = m.order == Order::interleaved ? INTERLEAVED : 1;
        while (true) {
            while (m.in_flight.size() < at_once && start()) {}
            if (m.in_flight.empty()) return;
            bool progress = false, slow = true;
            for (std::size_t k = 0; k < m.in_flight.size(); ++k) progress |= run_block(*m.in_flight[k]);
            slow = !finish();
            if (m.order == Order::interleaved && progress) continue;
            if (slow && m.in_flight.size() < MAX_IN_FLIGHT && start()) continue;
            if (!progress && slow) deadlock();
        }
    }

    // Removes blocks that have ended, when all blocks of their cluster have. Returns whether there was one.
    bool finish() {
        const std::size_t before = m.in_flight.size();
        const auto lives = [](const Block* block) { return block->alive > 0; };
        const auto runs = [&](const std::unique_ptr<Block>& block) {
            return std::any_of(block->cluster.begin(), block->cluster.end(), lives);
        };
        for (const auto& block : m.in_flight) {
            if (!runs(block)) async::finish(*block);
        }
        const auto first = std::stable_partition(m.in_flight.begin(), m.in_flight.end(), runs);
        m.in_flight.erase(first, m.in_flight.end());
        return m.in_flight.size() < before;
    }
};

static const Rows rows_{
    {"bra", Control::branch},
    {"brx", Control::branch_index},
    {"call", Control::call},
    {"ret", Control::ret},
    {"exit", Control::exit},
};

}  // namespace schedule
