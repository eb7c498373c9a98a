// The C interface of the engine: load a program, launch it.
#include "calls.h"
#include "carry.h"
#include "schedule.h"
#include "wgmma.h"

#include <sstream>

namespace {

struct ProgramData {
    const char* forms;  // one a line
    const int32_t* code;  // five numbers each: form, guard (0, predicate + 1, or minus that), first operand, count, place
    int64_t instructions;
    const int64_t* operands;  // four numbers each: kind, index, count, offset
    int64_t operand_count;
    const int32_t* parts;
    int64_t part_count;
    const uint64_t* constants;
    int64_t constant_count;
    const char* specials;  // lines "row name"
    uint32_t rows, predicates, shared_bytes, local_bytes, granule;
    const int64_t* gaps;  // two numbers each: the first byte, the byte after the last
    int64_t gap_count;
};

struct LaunchData {
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared, order, checks, variant, entry;
    int64_t budget;
    const uint8_t* params;
    int64_t param_bytes;
    int64_t array_count;
    uint8_t** arrays;
    const int64_t* array_bytes;
    uint8_t** written;         // null: all bytes are
    const uint8_t* constant;
    const uint8_t* early;      // null: the launch does not overlap the previous kernel
    Counts* counts;            // of each line; null: nothing is counted
    int64_t executed, lanes;   // results
    const int64_t* traced;     // a block and a thread each; null: no trace
    int64_t traced_count, array, byte;
    int64_t left_out;          // result
};

struct Loaded {
    Program program;
    std::string unknown;  // forms without a handler, one a line
};

std::vector<std::string> lines_of(const char* text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

void write(std::ostringstream& out, const Finding& found) {
    const char separator = '\x1f';
    out << found.kind << separator << found.text << separator << found.verb << separator << found.other_verb;
    for (const Access& each : {found.now, found.other}) {
        out << separator << each.block << separator << each.thread << separator << each.place;
    }
    out << separator << found.array << separator << found.byte << separator << found.bytes << '\x1e';
}

void write(std::ostringstream& out, const Step& step) {
    for (int64_t each : {step.at.block, step.at.thread, (int64_t)step.at.place, step.pc, (int64_t)step.array, step.byte}) {
        out << each << '\x1f';
    }
    out << step.bytes << '\x1f' << step.source << '\x1f' << step.kind << '\x1f' << step.value << '\x1f' << step.before
        << '\x1e';
}

}  // namespace

extern "C" {

Loaded* ptx_load(const ProgramData* data) {
    auto loaded = std::make_unique<Loaded>();
    Program& p = loaded->program;
    for (const std::string& text : lines_of(data->forms)) {
        Form& form = *p.forms.emplace_back(std::make_unique<Form>(text));
        form.counted = counters::kind_of(form);
        if (!find_handler(form)) loaded->unknown += text + "\n";
        p.compares |= form.has("cas");
    }
    for (int64_t k = 0; k < data->operand_count; ++k) {
        const int64_t* each = data->operands + 4 * k;
        p.operands.push_back({(Operand::Kind)each[0], (int32_t)each[1], (int32_t)each[2], 0, each[3]});
    }
    for (int64_t k = 0; k < data->instructions; ++k) {
        const int32_t* each = data->code + 5 * k;
        const Form* form = p.forms[each[0]].get();
        p.code.push_back({form, form->run, p.operands.data() + each[2], each[3], std::abs(each[1]) - 1, each[1] < 0, each[4]});
    }
    p.parts.assign(data->parts, data->parts + data->part_count);
    for (int64_t k = 0; k < data->constant_count; ++k) p.constants.insert(p.constants.end(), LANES, data->constants[k]);
    for (const std::string& line : lines_of(data->specials)) {
        const std::size_t space = line.find(' ');
        p.specials.emplace_back(std::stoi(line), line.substr(space + 1));
    }
    p.rows = (int)data->rows, p.predicates = (int)data->predicates;
    p.shared_bytes = data->shared_bytes, p.local_bytes = data->local_bytes, p.granule = data->granule;
    for (int64_t k = 0; k < data->gap_count; ++k) p.gaps.emplace_back(data->gaps[2 * k], data->gaps[2 * k + 1]);
    return loaded.release();
}

const char* ptx_unknown(const Loaded* loaded) { return loaded->unknown.c_str(); }

void ptx_unload(Loaded* loaded) { delete loaded; }

// Returns findings, then the printed text, as one text. The caller copies it before the thread's next launch.
const char* ptx_launch(const Loaded* loaded, LaunchData* data) {
    static thread_local std::string result;
    Machine m;
    m.program = &loaded->program;
    std::copy(data->grid, data->grid + 3, m.grid.begin());
    std::copy(data->block, data->block + 3, m.block.begin());
    std::copy(data->cluster, data->cluster + 3, m.cluster.begin());
    m.dynamic_bytes = data->shared, m.order = (Order)data->order, m.checks = data->checks, m.variant = data->variant;
    m.budget = data->budget, m.entry = data->entry, m.early = data->early, m.counts = data->counts;
    m.params.assign(data->params, data->params + data->param_bytes);
    for (int64_t k = 0; k < data->array_count; ++k) {
        Array& array = m.arrays.emplace_back();
        array.data = data->arrays[k], array.bytes = (uint64_t)data->array_bytes[k];
        array.written = data->written[k], array.constant = data->constant[k];
        if (m.checks) array.shadow = std::make_shared<Shadow>(array.bytes / m.program->granule + 1, false, (int)k);
    }
    if (m.checks) m.races = std::make_shared<Races>(m);
    if (data->traced) {
        m.trace = std::make_shared<Trace>(), m.races->holds = true;
        const int64_t* each = data->traced;
        for (int64_t k = 0; k < data->traced_count; ++k, each += 2) m.trace->threads.insert({each[0], each[1]});
        m.trace->array = (int)data->array, m.trace->byte = data->byte;
    }
    std::ostringstream out;
    try {
        schedule::Run(m).run();
    } catch (const Finding& found) {
        write(out, found);
    }
    for (const Finding& note : m.notes) write(out, note);
    out << '\x1d';
    if (m.trace) {
        for (const Step& step : m.trace->steps) write(out, step);
        data->left_out = m.trace->left_out;
    }
    data->executed = m.executed, data->lanes = m.lanes_executed;
    out << '\x1d' << m.printed;
    result = out.str();
    return result.c_str();
}
}
