// Records the steps of some threads: accesses to arrays and to shared memory, barriers, exchanges, fences, and their
// end.
#pragma once
#include "warp.h"

#include <set>

constexpr std::size_t MAX_STEPS = 20'000;  // that are kept: the last ones
constexpr std::size_t MAX_BYTES = 16;       // of a value

struct Step {
    Access at;
    const char* kind;
    int64_t pc, byte;  // byte: in the array; of "gathers": the mask of lanes
    int array = Finding::nowhere;
    std::size_t bytes = 0;      // of the access; of the value that is sent or received
    int source = -1;            // of "gathers": the lane whose value a shuffle takes
    std::string value, before;  // the bytes that are known, hexadecimal; before: of what an atomic operation changes
};

struct Trace {
    std::set<std::pair<int64_t, int64_t>> threads;  // (block, thread)
    int array = Finding::nowhere;  // any thread's write of this byte is a step, too
    int64_t byte = 0;
    int64_t left_out = 0;
    std::deque<Step> steps;
    const uint8_t* written = nullptr;  // where the last step writes a value that is not known yet

    bool follows(const Warp& w, int lane) const { return threads.count({w.block.number, w.thread(lane)}); }

    Step& add(const Warp& w, const Instr& i, int lane, const char* kind, int64_t byte = 0) {
        settle();
        if (steps.size() == MAX_STEPS) steps.pop_front(), ++left_out;
        return steps.emplace_back(Step{w.here(i, lane), kind, &i - w.machine.program->code.data(), byte});
    }
    void each(const Warp& w, const Instr& i, Mask lanes, const char* kind) {
        for_lanes(lanes, [&](int l) {
            if (follows(w, l)) add(w, i, l, kind);
        });
    }

    // The instruction, or its part for a lane, has ended: reads what it has written.
    [[gnu::cold]] void settle() {
        if (written) steps.back().value = bytes_at(written, steps.back().bytes);
        written = nullptr;
    }
    static std::string bytes_at(const void* data, std::size_t bytes) {  // hexadecimal
        std::string text;
        for (std::size_t k = 0; k < std::min(bytes, MAX_BYTES); ++k) {
            const uint8_t byte = static_cast<const uint8_t*>(data)[k];
            text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
        }
        return text;
    }

    // An access to bytes of an array. data: where they are; null outside of it.
    [[gnu::cold]] void access(const Warp& w, const Instr& i, int lane, int number, int64_t from, unsigned bytes,
                              unsigned use, const uint8_t* data) {
        settle();
        const bool named = number == array && use & WRITES && from <= byte && byte < from + (int64_t)bytes;
        const bool calls = i.form->name == "vprintf" || i.form->name == "assertfail";  // which read a text
        if (calls || (!named && !follows(w, lane))) return;
        Step& step = add(w, i, lane, use & ATOMIC ? "atomically changes" : use & WRITES ? "writes" : "reads", from);
        step.array = number, step.bytes = bytes;
        if (i.form->name == "st" && !(use & READS)) {  // it writes after all checks
            const int count = i.op[1].count;
            for (int k = 0; k < count; ++k) step.value += bytes_at(w.in(i, 1, k) + lane, bytes / (unsigned)count);
        } else if (data && use & WRITES) {
            written = data;
            if (use & ATOMIC) step.before = bytes_at(data, bytes);
        } else if (data) {
            step.value = bytes_at(data, bytes);
        }
    }

    // A lane comes to an instruction of several lanes, and sends a value.
    void arrives(const Warp& w, const Instr& i, int lane, Mask mask) {
        if (!follows(w, lane)) return;
        Step& step = add(w, i, lane, "gathers", mask);
        const std::string& name = i.form->name;
        bool within;
        if (name == "shfl") step.source = warp::source(w, i, lane, within);
        if (name == "vote" || name == "redux") keep(step, w, i, lane, 1);
        if (name == "shfl" || name == "match") keep(step, w, i, lane, i.count - (name == "shfl" ? 4 : 2));
    }
    void receives(const Warp& w, const Instr& i, int lane) {
        settle();
        const bool value = i.form->gathers != WHOLE_WARP && i.count > 2;  // not of bar.warp.sync
        if (value && follows(w, lane)) keep(add(w, i, lane, "receives"), w, i, lane, 0);
    }
    static void keep(Step& step, const Warp& w, const Instr& i, int lane, int k) {
        const bool row = i.op[k].kind == Operand::row;
        const uint64_t value = row ? w.in(i, k)[lane] : w.predicate(i, k) >> lane & 1;
        step.value = bytes_at(&value, step.bytes = row ? std::max(4u, i.form->type().bits / 8) : 1);
    }
};
