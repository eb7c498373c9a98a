// The C interface of the engine: load a program, launch it.
#include "calls.h"
#include "carry.h"
#include "schedule.h"
#include "wgmma.h"

namespace {

template <class T>
struct Table {
    const T* first;
    int64_t count;
    const T* begin() const { return first; }
    const T* end() const { return first + count; }
};

struct Code {
    int32_t form, guard, first_operand, operands, place;  // guard: 0, predicate + 1, or minus that
};

struct ProgramData {
    const char *forms, *specials;  // lines; "row name"
    Table<Code> code;
    Table<Operand> operands;
    Table<int32_t> parts;
    Table<uint64_t> constants;
    Table<std::pair<int64_t, int64_t>> gaps;
    Sizes sizes;
};

struct Loaded {
    Program program;
    std::string unknown;  // forms without a handler, one a line
};

void write(std::ostringstream& out, const Finding& found) {
    const char separator = '\x1f';
    out << found.kind << separator << found.text << separator << found.verb << separator << found.other_verb;
    for (const Access& each : {found.now, found.other}) {
        out << separator << each.block << separator << each.thread << separator << each.place;
    }
    out << separator << found.array << separator << found.byte << separator << found.bytes << '\x1e';
}

void write(std::ostringstream& out, const Step& step) {
    const Access& at = step.at;
    for (int64_t each : {at.block, at.thread, (int64_t)at.place, step.pc, (int64_t)step.array, step.byte}) {
        out << each << '\x1f';
    }
    out << step.bytes << '\x1f' << step.source;
    for (const std::string& each : {std::string(step.kind), step.value, step.before}) out << '\x1f' << each;
    out << '\x1e';
}

}  // namespace

extern "C" {

Loaded* ptx_load(const ProgramData* data) {
    auto loaded = std::make_unique<Loaded>();
    Program& p = loaded->program;
    static_cast<Sizes&>(p) = data->sizes;
    for (const std::string& text : split(data->forms, '\n')) {
        Form& form = *p.forms.emplace_back(std::make_unique<Form>(text));
        form.counted = counters::kind_of(form);
        if (!find_handler(form)) loaded->unknown += text + "\n";
        p.compares |= form.has("cas");
    }
    p.operands.assign(data->operands.begin(), data->operands.end());
    p.parts.assign(data->parts.begin(), data->parts.end());
    p.gaps.assign(data->gaps.begin(), data->gaps.end());
    for (const Code& each : data->code) {
        const Form* form = p.forms[each.form].get();
        const Operand* first = p.operands.data() + each.first_operand;
        p.code.push_back({form, form->run, first, each.operands, std::abs(each.guard) - 1, each.guard < 0, each.place});
    }
    for (uint64_t value : data->constants) p.constants.insert(p.constants.end(), LANES, value);
    for (const std::string& line : split(data->specials, '\n')) {
        p.specials.emplace_back(std::stoi(line), line.substr(line.find(' ') + 1));
    }
    return loaded.release();
}

const char* ptx_unknown(const Loaded* loaded) { return loaded->unknown.c_str(); }

void ptx_unload(Loaded* loaded) { delete loaded; }

// Returns findings, then the printed text, as one text. The caller copies it before the thread's next launch.
const char* ptx_launch(const Loaded* loaded, Launch* launch) {
    static thread_local std::string result;
    Machine m;
    static_cast<Launch&>(m) = *launch;
    m.program = &loaded->program;
    for (int64_t k = 0; k < m.array_count; ++k) {
        Array& array = m.arrays.emplace_back(Array{m.array_data[k]});
        if (m.checks) array.shadow = std::make_shared<Shadow>(array.bytes / m.program->granule + 1, false, (int)k);
    }
    if (m.checks) m.races = std::make_shared<Races>(m);
    if (m.traced) {
        m.trace = std::make_shared<Trace>(), m.races->holds = true;
        for (const int64_t* each = m.traced; each < m.traced + 2 * m.traced_count; each += 2) {
            m.trace->threads.insert({each[0], each[1]});
        }
        m.trace->array = (int)m.traced_array, m.trace->byte = m.traced_byte;
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
        m.left_out = m.trace->left_out;
    }
    *launch = m;
    out << '\x1d' << m.printed;
    result = out.str();
    return result.c_str();
}
}
