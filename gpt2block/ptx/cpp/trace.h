// Records the steps of some threads: accesses to arrays and to shared memory, barriers, exchanges, fences, and their end.
#pragma once
#include "warp.h"

#include <set>

struct Step {
    enum Kind : int32_t { reads, writes, changes, waits, arrives, passes, gathers, receives, fence, fence_of_block, returns };
    int64_t block, byte;  // byte: in the array; of `gathers`: the mask of lanes
    int32_t thread, pc, place, kind;
    int32_t array = Finding::nowhere, bytes = 0;  // bytes: of the access; of the value that is sent or received
    int32_t known = 0, old = 0;  // number of known bytes in `value` and `before`
    int32_t source = -1;         // of `gathers`: the lane whose value a shuffle takes
    uint8_t value[16] = {}, before[16] = {};  // before: of what an atomic operation changes
};

struct Trace {
    std::set<std::pair<int64_t, int64_t>> threads;  // (block, thread)
    int array = Finding::nowhere;  // any thread's write of this byte is a step, too
    int64_t byte = 0;
    std::size_t most = 0;          // steps that are kept: the last ones
    int64_t left_out = 0;
    std::deque<Step> steps;
    const uint8_t* written = nullptr;  // where the last step writes a value that is not known yet

    bool follows(const Warp& w, int lane) const { return threads.count({w.block.number, w.thread(lane)}); }

    void add(const Warp& w, const Instr& i, int lane, Step::Kind kind, int64_t byte = 0) {
        settle();
        if (steps.size() == most) steps.pop_front(), ++left_out;
        const int32_t pc = (int32_t)(&i - w.machine.program->code.data());
        steps.push_back({w.block.number, byte, w.thread(lane), pc, w.here(i, lane).place, kind});
    }
    void each(const Warp& w, const Instr& i, Mask lanes, Step::Kind kind) {
        for_lanes(lanes, [&](int l) {
            if (follows(w, l)) add(w, i, l, kind);
        });
    }

    // The instruction, or its part for a lane, has ended: reads what it has written.
    [[gnu::cold]] void settle() {
        if (!written) return;
        keep(written, steps.back().bytes);
        written = nullptr;
    }
    void keep(const void* data, int bytes) {
        steps.back().known = std::min(bytes, 16);
        std::memcpy(steps.back().value, data, steps.back().known);
    }

    // An access to bytes of an array. data: where they are; null outside of it.
    [[gnu::cold]] void access(const Warp& w, const Instr& i, int lane, int number, int64_t from, unsigned bytes, unsigned use,
                const uint8_t* data) {
        settle();
        const bool named = number == array && use & WRITES && from <= byte && byte < from + (int64_t)bytes;
        if (!named && !follows(w, lane)) return;
        add(w, i, lane, use & ATOMIC ? Step::changes : use & WRITES ? Step::writes : Step::reads, from);
        Step& step = steps.back();
        step.array = number, step.bytes = (int32_t)bytes;
        if (i.form->name == "st" && !(use & READS)) return keep_operand(w, i, lane, bytes / (unsigned)i.op[1].count);
        if (!data) return;
        if (!(use & WRITES)) return keep(data, (int)bytes);
        if (use & ATOMIC) std::memcpy(step.before, data, step.old = std::min(step.bytes, 16));
        written = data;
    }
    void keep_operand(const Warp& w, const Instr& i, int lane, unsigned size) {  // a store's, written after all checks
        Step& step = steps.back();
        for (int k = 0; k < i.op[1].count && step.known + size <= 16; ++k, step.known += (int)size) {
            std::memcpy(step.value + step.known, w.in(i, 1, k) + lane, size);
        }
    }

    // A lane comes to an instruction of several lanes, and sends a value.
    void arrives(const Warp& w, const Instr& i, int lane, Mask mask) {
        if (!follows(w, lane)) return;
        add(w, i, lane, Step::gathers, mask);
        const std::string& name = i.form->name;
        const bool shuffles = name == "shfl";
        if (!shuffles && name != "vote" && name != "redux" && name != "match") return;
        bool within;
        if (shuffles) steps.back().source = warp::source(w, i, lane, within);
        keep_row(w, i, lane, shuffles ? i.count - 4 : name == "match" ? i.count - 2 : 1);
    }
    void receives(const Warp& w, const Instr& i, int lane) {
        if (!follows(w, lane) || i.op[0].kind == Operand::address || i.form->gathers == WHOLE_WARP) return;
        if (i.count < 3) return;  // bar.warp.sync
        add(w, i, lane, Step::receives);
        keep_row(w, i, lane, 0);
    }
    void keep_row(const Warp& w, const Instr& i, int lane, int k) {
        const bool row = i.op[k].kind == Operand::row;
        const uint64_t value = row ? w.in(i, k)[lane] : w.predicate(i, k) >> lane & 1;
        keep(&value, steps.back().bytes = row ? std::max(4u, i.form->type().bits / 8) : 1);
    }
};
