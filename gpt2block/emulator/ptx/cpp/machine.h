// The machine that executes PTX: values, instructions, warps, blocks, and the table of the handlers of instructions.
//
// A header adds rows to the table. A row's opcode is a name, perhaps with modifiers and types that a form must have; of
// the rows that fit a form, the one with the most words serves it:
//
//     static const Rows rows_{
//         {"popc", integers([](auto a) { return __builtin_popcountll(a); })},  // a Pick: by types
//         {"shfl.up", shfl<UP>, LAST},                                        // a handler, and which lanes it gathers
//     };
//
// A Pick is called once per form ("popc.b32") when a program is loaded. It may store settings in f.arg, and returns
// null for a form that it does not know; the next row is then tried. A form that no row knows is not judged. A handler
// is called with the lanes that are active after the guard; it writes only their values.
//
// Values of lanes: a value is zero-extended to 64 bits when it is written (a .b32 register holds 32 bits, an .f16x2
// too). The values of 32 lanes are a row; immediates and special registers are rows as well. Predicates are masks:
// w.predicate(i, k), w.set_predicate(i, k, active, mask). A vector operand {a, b, c, d} has i.op[k].count rows:
// w.in(i, k, j), w.out(i, k, j). "_" as a destination is a row that nobody reads. An address operand [a+8]:
// w.address(i, k, lane).
//
// Instructions of several lanes: the row's `gathers` is LAST if the last operand is the mask of lanes, or WHOLE_WARP
// (mma, ldmatrix). The scheduler then calls the handler once, when all lanes of the mask have arrived at the
// instruction. A handler that cannot complete calls w.again(lanes): these lanes execute the instruction again at their
// next turn. If nothing else proceeds in the whole launch, this is a deadlock and becomes a finding.
//
// Memory: Machine::access() checks bounds, alignment, unwritten bytes and races, and returns the address of the bytes
// on the host. Wrong kernels: Machine::fail() throws a Finding, which ends the launch.
#pragma once
#include "numbers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

constexpr int LANES = 32;
using Mask = uint32_t;  // bit l: lane l

// Returns how many values of a type a function takes.
template <class F, class T>
constexpr std::size_t arity() {
    if (std::is_invocable_v<F, T>) return 1;
    return std::is_invocable_v<F, T, T> ? 2 : std::is_invocable_v<F, T, T, T> ? 3 : 4;
}

template <class F>
inline void for_lanes(Mask active, F f) {
    if (active == ~0u) {
#pragma GCC ivdep
        for (int l = 0; l < LANES; ++l) f(l);
        return;
    }
    for (Mask rest = active; rest; rest &= rest - 1) f(__builtin_ctz(rest));
}

// Returns the active lanes for which a condition holds.
template <class F>
inline Mask lanes_where(Mask active, F holds) {
    Mask found = 0;
    for_lanes(active, [&](int l) { found |= (Mask) static_cast<bool>(holds(l)) << l; });
    return found;
}

struct Type {
    char kind = 'b';    // u, s, b, f (floating point of any format), p (predicate)
    unsigned bits = 0;  // of the whole value: 32 for f16x2
    std::string name;   // "f16x2"
    bool is(const char* other) const { return name == other; }
    bool is_signed() const { return kind == 's'; }
};

inline std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
    return parts;
}

struct Warp;
struct Instr;
struct Form;
struct Machine;
using Handler = void (*)(Warp&, const Instr&, Mask active);

enum Gathers { NO_LANES = -1, WHOLE_WARP = -2, LAST = -3 };  // LAST: the lanes of the mask that is the last operand
enum class Counted : uint8_t { nothing, branch, shuffle, barrier, load, store, atomic, matrices, copy };  // counters.h
enum class Control : uint8_t { none, branch, branch_index, call, ret, exit, barrier };
enum class Space : uint8_t { generic, global, shared, local, param, constant, cluster };

// An opcode with its types and modifiers: "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32".
struct Form {
    std::string name;                    // "mma"
    std::vector<std::string> words;      // all parts
    std::vector<Type> types;             // in order: f32, f16, f16, f32
    Space space = Space::generic;        // of the addresses
    numbers::Way way;                    // how a result is rounded
    Handler run = nullptr;
    Control control = Control::none;
    int gathers = NO_LANES;
    Counted counted = Counted::nothing;
    bool stores = false;                 // whether a warp as a whole stores (wmma.store, stmatrix)
    int64_t arg[4] = {};                 // settings for the handler
    std::shared_ptr<void> details;       // what they point to

    explicit Form(const std::string& text);
    bool has(const char* word) const { return std::find(words.begin(), words.end(), word) != words.end(); }
    const Type& type(std::size_t n = 0) const {
        static const Type none;
        return n < types.size() ? types[n] : none;
    }
};

struct Operand {
    enum Kind : int32_t { row, predicate, not_predicate, address, label, none } kind = none;
    int32_t index = 0;   // of the first row in Program::rows; of the predicate; of the label's instruction
    int32_t count = 0;   // number of rows; more than 1: `index` is of the first in Program::parts
    int32_t pad = 0;
    int64_t offset = 0;  // address: added to the row
};

struct Instr {
    const Form* form;
    Handler run;
    const Operand* op;
    int32_t count;       // number of operands
    int32_t guard = -1;  // predicate, or -1
    bool guard_not = false;
    int32_t place = 0;   // number of the line (file and line of the .cu) in the program's table; 0: not known
};

using Pick = Handler (*)(Form&);

struct Row {
    const char* opcodes;  // separated by spaces
    Pick pick = nullptr;
    Handler run = nullptr;
    int gathers = NO_LANES;
    Control control = Control::none;

    constexpr Row(const char* names, Pick p, int g = NO_LANES) : opcodes(names), pick(p), gathers(g) {}
    constexpr Row(const char* names, Handler h, int g = NO_LANES) : opcodes(names), run(h), gathers(g) {}
    constexpr Row(const char* names, Control c) : opcodes(names), run([](Warp&, const Instr&, Mask) {}), control(c) {}
};

using Words = std::vector<std::string>;  // of an opcode

inline std::vector<std::pair<Words, Row>>& table() {
    static std::vector<std::pair<Words, Row>> rows;
    return rows;
}

struct Rows {
    Rows(std::initializer_list<Row> rows) {
        for (const Row& row : rows) {
            for (const std::string& opcode : split(row.opcodes, ' ')) table().emplace_back(split(opcode, '.'), row);
        }
    }
};

static void nothing(Warp&, const Instr&, Mask) {}

// An error of a kernel. Python writes the text: it knows the lines, the names and the elements.
struct Access {  // who touched memory, and where in the program
    int64_t block = -1, thread = -1;
    int32_t place = -1;
};

struct Finding {
    std::string kind;   // "race", "out of bounds", "unwritten", "misaligned", "barrier", "mask", "endless", "trap", ...
    std::string text;   // a clause in plain words, such as "the mask names the lane of a thread that has returned"
    Access now, other;  // other: the second access or lane, if thread >= 0
    std::string verb, other_verb;  // "reads", "wrote"
    enum Where { nowhere = -1, in_shared = -2, in_local = -3, in_params = -4 };
    int array = nowhere;  // of Machine::arrays, or a Where
    int64_t byte = 0;     // in the array
    int64_t bytes = 0;  // of the access
};

// Generic addresses: the number of an array in the bits from 36 on. Arrays begin near the middle of their range, so
// that addresses before them name them, too. Windows of shared memory, local memory and parameters have their own
// numbers.
constexpr int ARRAY_SHIFT = 36;
constexpr uint64_t SHARED_WINDOW = 1ull << ARRAY_SHIFT;  // + (rank of the block in its cluster + 1, or 0: own) << 24
constexpr uint64_t LOCAL_WINDOW = 2ull << ARRAY_SHIFT;   // + thread << 24
constexpr uint64_t PARAM_WINDOW = 3ull << ARRAY_SHIFT;
constexpr int FIRST_ARRAY = 4;
constexpr uint64_t CODE = 1ull << 60;  // + the number of an instruction: the address of a function
constexpr int RANK_SHIFT = 24;

enum Use : unsigned {  // how an instruction touches memory; sums of these
    READS = 1,
    WRITES = 2,
    STRONG = 4,      // volatile, relaxed or stronger: two strong accesses are no race
    ATOMIC = 8,      // reads, changes and writes at once (with READS | WRITES | STRONG)
    READ_ONLY = 16,  // by the read-only cache (ld.global.nc)
    UNWRITTEN = 32,  // may read bytes that nobody has written
    RESULTLESS = 64, // atomic, and no instruction uses the value before
};

struct Trace;   // trace.h
struct Counts;  // counters.h
struct Races;   // races.h
struct Shadow;  // races.h: the last accesses to the cells of an array

struct ArrayData {  // an argument or a variable of the module, as engine.py fills it
    uint8_t *data, *written;  // written: per byte, whether it was written; null: all were
    uint64_t bytes, origin;   // origin: generic address of the first byte
    uint64_t constant;        // whether writing is a finding
};
struct Array : ArrayData { std::shared_ptr<Shadow> shadow; };

struct Program;
struct Block;
struct AsyncBlock;  // async.h: what a block has in flight (copies, mbarriers); made there when first used

enum class Lane : uint8_t { runs, gathers, waits, done };  // gathers: at a mask; waits: at a barrier of the block

struct Saved {  // the registers and the local memory of a thread that has called a running function again
    std::vector<uint64_t> rows;
    std::vector<bool> predicates;
    std::vector<uint8_t> local;
    int result = 0, result_bytes = 0;  // in local memory
};

struct Warp {
    Machine& machine;
    Block& block;
    int first = 0;   // number of lane 0's thread in the block
    Mask exist = 0;  // lanes that are threads
    std::vector<uint64_t> rows;  // row 0 is written by the destination "_"
    std::vector<Mask> predicates;
    std::array<uint32_t, LANES> pc{};
    std::array<Lane, LANES> state{};
    std::array<Mask, LANES> mask{};  // of lanes that gather
    Mask repeats = 0;                // lanes that have called again()
    Mask gives_way = 0;              // lanes whose loop has run long while others are ready
    Mask waited = 0;                 // lanes for which the previous kernel has ended (griddepcontrol.wait)
    Mask carry = 0;                  // of the last add.cc, sub.cc or mad.cc of each lane
    bool yields = false;             // an instruction such as nanosleep ends the turn
    std::array<std::vector<Saved>, LANES> calls;
    std::array<uint32_t, LANES> caller{};  // pc of the last call in a line that is known
    uint32_t met = 0;                // stamp up to which all lanes know each other's accesses

    Warp(Machine& m, Block& b) : machine(m), block(b) {}
    int thread(int lane) const { return first + lane; }
    inline Access here(const Instr& i, int lane) const;
    inline const uint64_t* in(const Instr& i, int k, int j = 0) const;
    inline uint64_t* out(const Instr& i, int k, int j = 0);
    Mask predicate(const Instr& i, int k) const {  // operands "%p1", "!%p1"
        const Operand& op = i.op[k];
        return op.kind == Operand::not_predicate ? ~predicates[op.index] : predicates[op.index];
    }
    void set_predicate(const Instr& i, int k, Mask active, Mask value) {
        if (i.op[k].kind == Operand::none) return;
        Mask& p = predicates[i.op[k].index];
        p = (p & ~active) | (value & active);
    }
    uint64_t address(const Instr& i, int k, int lane) const { return in(i, k)[lane] + i.op[k].offset; }

    // d = f(a, b, ...) for the active lanes, with values of a type, from operand 1 on as many as f takes.
    template <class T = uint64_t, class F>
    void map(const Instr& i, Mask active, F f) {
        map<T>(i, active, f, std::make_index_sequence<arity<F, T>()>());
    }
    template <class T, class F, std::size_t... K>
    void map(const Instr& i, Mask active, F f, std::index_sequence<K...>) {
        const uint64_t* const from[] = {in(i, 1 + (int)K)...};
        uint64_t* d = out(i, 0);
        for_lanes(active, [=](int l) { d[l] = (std::make_unsigned_t<T>)(T)f((T)from[K][l]...); });
    }
    void again(Mask lanes) { repeats |= lanes; }
};

struct Barrier {
    int arrived = 0, expected = 0;   // threads; expected 0: nobody is here
    Access here;                     // of the first arrival
    int holds = 0;                   // bar.red: threads whose predicate holds
    std::vector<int> came;           // threads that have arrived, with those that do not wait
};

struct Thread {  // what a thread knows about accesses of others (races.h)
    std::vector<uint32_t> of;  // by lane of its warp: stamp of the last known access; empty: only Warp::met
    std::shared_ptr<struct Facts> facts;
};

struct Block {
    Machine& machine;
    int64_t number = 0;                    // linear, in the grid
    std::array<uint32_t, 3> id{};
    int rank = 0;                          // in its cluster
    std::vector<Block*> cluster;           // blocks of the cluster by rank; only itself without clusters
    std::deque<Warp> warps;
    std::vector<uint8_t> shared, written;  // bytes, and which of them were written
    std::vector<uint8_t> local, local_written;  // of all threads, one after the other
    std::array<Barrier, 16> barriers;
    std::shared_ptr<AsyncBlock> async;
    int alive = 0;                         // threads that have not returned
    bool waited = false;                   // whether a thread has waited for the previous kernel
    uint32_t phase = 0;                    // stamp up to which all threads know each other's accesses
    std::vector<Thread> knowledge;         // of threads
    std::shared_ptr<Shadow> shadow;        // last accesses to shared memory

    explicit Block(Machine& m) : machine(m) {}
    inline int threads() const;
    inline uint32_t cluster_size() const;
};

struct Sizes {
    uint32_t rows = 0, predicates = 0;
    uint32_t shared_bytes = 0;  // static
    uint32_t local_bytes = 0;   // of a thread
    uint32_t granule = 4;       // bytes of the smallest access of the program
};

struct Program : Sizes {  // of one kernel; made by encode.py
    std::vector<std::unique_ptr<Form>> forms;
    std::vector<Instr> code;
    std::vector<Operand> operands;
    std::vector<int32_t> parts;       // rows of vector operands
    std::vector<uint64_t> constants;  // rows of 32 equal values; row -1 - n is the n-th
    std::vector<std::pair<int64_t, int64_t>> gaps;  // in static shared memory, between variables
    bool compares = false;            // whether the program has an atom.cas
    std::vector<std::pair<int, std::string>> specials;  // row -> "%tid.x", set when a warp starts
};

enum class Order : uint32_t { forward, reverse, shuffled, interleaved };

struct Launch {  // as engine.py fills it
    std::array<uint32_t, 3> grid{}, block{}, cluster{1, 1, 1};
    uint32_t dynamic_bytes = 0;        // of shared memory
    Order order = Order::forward;
    uint32_t checks = true;            // bounds, races, unwritten memory
    uint32_t variant = 0;              // even or odd: two values of %smid, %warpid, %clock, ...
    uint32_t entry = 0;                // index of the kernel's first instruction
    uint32_t variables = 0;            // number of the first arrays, which are variables of the module
    int64_t budget = 0;                // warp instructions that are left
    uint8_t* params = nullptr;
    int64_t param_bytes = 0, array_count = 0;
    const ArrayData* array_data = nullptr;
    const uint8_t* early = nullptr;    // per array, whether it may be accessed before the wait for the previous kernel
    Counts* counts = nullptr;          // of each line; null: nothing is counted
    int64_t executed = 0;              // result
    const int64_t* traced = nullptr;   // a block and a thread each; null: no trace
    int64_t traced_count = 0, traced_array = 0, traced_byte = 0;
    int64_t left_out = 0;              // result
};

struct Machine : Launch {
    const Program* program = nullptr;
    std::deque<Array> arrays;    // number FIRST_ARRAY + n in addresses
    std::string printed;
    std::vector<Finding> notes;  // what does not end the launch: reading memory that nobody has written
    std::shared_ptr<Races> races;
    std::shared_ptr<Trace> trace;
    std::vector<std::unique_ptr<Block>> in_flight;

    // Returns the byte of values that no thread has written: NaN, or in each format a large positive, a usual, and a
    // large negative number.
    uint8_t fill() const {
        static constexpr uint8_t by_order[] = {0xff, 0x7b, 0x3c, 0xfb};
        return by_order[(int)order];
    }

    // Returns where `bytes` bytes at an address of a lane are on the host. Throws a Finding if the lane must not touch
    // them in this way. space: of the instruction; `generic` for generic addresses.
    uint8_t* access(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space, unsigned use);

    [[noreturn]] void fail(const Warp& w, const Instr& i, int lane, const char* kind, std::string text) const {
        throw Finding{.kind = kind, .text = std::move(text), .now = w.here(i, lane)};
    }
    // Findings that do not end the launch: the first of each kind and array is kept.
    bool noted(const std::string& kind, int array) const {
        const auto same = [&](const Finding& each) { return each.kind == kind && each.array == array; };
        return std::any_of(notes.begin(), notes.end(), same);
    }
    void note(const Finding& found) {
        if (!noted(found.kind, found.array)) notes.push_back(found);
    }
};

inline const uint64_t* Warp::in(const Instr& i, int k, int j) const {
    const Operand& op = i.op[k];
    const int row = op.count > 1 ? machine.program->parts[op.index + j] : op.index;
    return row < 0 ? machine.program->constants.data() + (-1 - row) * LANES : rows.data() + row * LANES;
}

inline uint64_t* Warp::out(const Instr& i, int k, int j) {
    const Operand& op = i.op[k];
    return rows.data() + (op.count > 1 ? machine.program->parts[op.index + j] : op.index) * LANES;
}

// Returns the place of a lane: in a function without lines of its own, the line that calls the function.
inline Access Warp::here(const Instr& i, int lane) const {
    return {block.number, thread(lane), i.place ? i.place : machine.program->code[caller[lane]].place};
}

inline uint32_t product(const std::array<uint32_t, 3>& sizes) { return sizes[0] * sizes[1] * sizes[2]; }
inline int Block::threads() const { return product(machine.block); }
inline uint32_t Block::cluster_size() const { return product(machine.cluster); }

inline Type type_named(const std::string& word) {
    static const std::unordered_map<std::string, Type> all = [] {
        std::unordered_map<std::string, Type> made;
        const auto add = [&](const std::string& name, char kind, unsigned bits) { made[name] = {kind, bits, name}; };
        for (unsigned bits : {8, 16, 32, 64, 128}) {
            for (char kind : {'u', 's', 'b'}) add(kind + std::to_string(bits), kind, bits);
        }
        for (unsigned bits : {16, 32, 64}) add("f" + std::to_string(bits), 'f', bits);
        add("u16x2", 'u', 32), add("s16x2", 's', 32), add("f16x2", 'f', 32), add("bf16x2", 'f', 32);
        add("bf16", 'f', 16), add("tf32", 'f', 32), add("pred", 'p', 1), add("f32x2", 'f', 64);
        for (const char* name : {"e4m3", "e5m2"}) add(name, 'f', 8), add(name + std::string("x2"), 'f', 16);
        for (const char* name : {"u4", "s4", "b1", "e2m1"}) add(name, name[0] == 'e' ? 'f' : name[0], name[1] - '0');
        return made;
    }();
    const auto found = all.find(word);
    return found == all.end() ? Type() : found->second;
}

inline Space space_named(const std::string& word) {
    static const std::unordered_map<std::string, Space> all = {
        {"global", Space::global}, {"shared", Space::shared}, {"shared::cta", Space::shared},
        {"shared::cluster", Space::cluster}, {"local", Space::local}, {"const", Space::constant},
        {"param", Space::param}, {"param::entry", Space::param}, {"param::func", Space::param}};
    const auto found = all.find(word);
    return found == all.end() ? Space::generic : found->second;
}

inline Form::Form(const std::string& text) : words(split(text, '.')) {
    using numbers::Round;
    static const std::unordered_map<std::string, Round> rounds = {
        {"rz", Round::zero}, {"rm", Round::down}, {"rp", Round::up}, {"rna", Round::away},
        {"rzi", Round::zero}, {"rmi", Round::down}, {"rpi", Round::up}};
    name = words[0];
    for (const std::string& word : words) {
        if (const Type type = type_named(word); type.bits) types.push_back(type);
        if (space == Space::generic) space = space_named(word);
        if (rounds.count(word)) way.round = rounds.at(word);
        way.integral |= word.size() == 3 && word[0] == 'r' && word[2] == 'i';
    }
    way.ftz = has("ftz"), way.sat = has("sat"), way.relu = has("relu"), way.finite = has("satfinite");
    stores = name == "stmatrix" || has("store");
}

// Finds the handler of a form among the rows of an opcode. Returns whether there is one.
inline bool find_handler(Form& f, const std::string& name) {
    std::vector<const std::pair<Words, Row>*> fitting;
    const auto has = [&](const std::string& word) { return f.has(word.c_str()); };
    for (const auto& each : table()) {
        const Words& words = each.first;
        if (words[0] == name && std::all_of(words.begin() + 1, words.end(), has)) fitting.push_back(&each);
    }
    const auto longer = [](auto* a, auto* b) { return a->first.size() > b->first.size(); };
    std::stable_sort(fitting.begin(), fitting.end(), longer);
    for (const auto* each : fitting) {
        const Row& row = each->second;
        f.gathers = row.gathers, f.control = row.control;
        f.run = row.pick ? row.pick(f) : row.run;
        if (f.run) return true;
    }
    return false;
}
inline bool find_handler(Form& f) { return find_handler(f, f.name); }
