// Traces the steps of chosen threads up to a problem; part of races.cpp. TRACE names the problem: race, outside (an
// access outside of all arrays), unwritten (a read of shared memory that no thread has written), barrier, or
// wrote:NAME:BYTE (the last write of a byte of an argument). A first launch, without TRACED, prints the threads of the
// problem in a line "met". A second launch has these threads in TRACED, as block:thread, and prints a line "step" for
// each of their accesses, barriers and exchanges. emulator/trace.py reads the lines.
#pragma once

Region* region_of(const char* address);
void check_access(const char* first, std::size_t bytes, const Doing& now);

extern "C" char __executable_start[] __attribute__((weak));

struct Trace {
    std::string until;  // the problem; empty: the launch is not traced
    std::vector<std::pair<unsigned, int>> threads;  // (block, thread); empty: the launch searches for the threads

    bool finds() const { return threads.empty(); }
    bool searches_races() const { return until.empty() || until == "race" || until == "unwritten"; }
    bool follows(int thread) const {
        return std::find(threads.begin(), threads.end(), std::make_pair(block, thread)) != threads.end();
    }
};

const Trace trace = [] {
    Trace made;
    if (const char* until = std::getenv("TRACE")) made.until = until;
    const char* rest = std::getenv("TRACED");
    unsigned number;
    int thread, read;
    for (; rest && std::sscanf(rest, "%u:%d%n", &number, &thread, &read) == 2; rest += read) {
        made.threads.emplace_back(number, thread);
    }
    return made;
}();
const bool tracing = !trace.until.empty();
constexpr int MOST_STEPS = 200'000;

// A write of a traced thread. Its value is known only after the write. Therefore the write is printed, and unless it is
// atomic or volatile checked for a race, before the next event of any thread.
struct Pending {
    const char* first;
    std::size_t bytes;
    Doing now;
    std::string old;  // hexadecimal bytes before an atomic access
};
std::optional<Pending> pending;

void print_step(unsigned in_block, int thread, const char* kind, const std::string& rest) {
    static int steps;
    std::fprintf(stderr, "step\t%u\t%d\t%s\t%s\n", in_block, thread, kind, rest.c_str());
    if (++steps < MOST_STEPS) return;
    std::fprintf(stderr, "long\n");
    _exit(3);
}

// Prints the threads of the problem in a launch that searches for them. Afterwards the launch ends, or continues if a
// later problem of the kind replaces this one.
void met(std::initializer_list<std::pair<unsigned, int>> threads) {
    if (!tracing || !trace.finds()) return;
    std::fprintf(stderr, "met");
    for (const auto& [number, thread] : threads) std::fprintf(stderr, " %u:%d", number, thread);
    std::fprintf(stderr, "\n");
}

std::string hexadecimal(const char* first, std::size_t bytes) {
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(bytes, 16); ++i) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(first[i]));
        text += two;
    }
    return text;
}

// Returns the region that contains an address, or else the nearest region of an argument or of dynamic shared memory.
const Region* nearest(const char* address) {
    if (const Region* region = region_of(address)) return region;
    const Region* best = nullptr;
    std::ptrdiff_t least = 2 << 20;
    for (const Region& region : regions) {
        if (region.kind == Kind::shared || region.kind == Kind::variables || !region.data) continue;
        const char* stop = region.data + region.bytes;
        const std::ptrdiff_t away = address < region.data ? region.data - address : address - stop;
        if (away < least) least = away, best = &region;
    }
    return best;
}

// Prints an access: its place, region, byte and bytes, number of elements, address, value, and old value of an atomic.
void print_access(const char* kind, const char* first, std::size_t bytes, const Doing& now, const std::string& value,
                  const std::string& old = "") {
    const Region* region = value == "outside" ? nearest(first) : region_of(first);
    const bool of_variable = region && (region->kind == Kind::shared || region->kind == Kind::variables);
    char text[160];
    std::snprintf(text, sizeof text, "0x%x\t%s\t%td\t%zu\t%zu\t%zu\t%p\t", now.access.place,
                  !region ? "?" : of_variable ? "" : region->name.c_str(), region ? first - region->data : 0, bytes,
                  region ? region->bytes : 0, region ? region->element : bytes, static_cast<const void*>(first));
    print_step(now.access.block, now.access.thread, kind, text + value + "\t" + old);
}

void settle_store() {
    if (!pending) return;
    const Pending store = *pending;
    pending.reset();
    const std::string value = hexadecimal(store.first, store.bytes);
    print_access(store.now.verb.is, store.first, store.bytes, store.now, value, store.old);
    if (!store.now.strong && trace.searches_races()) check_access(store.first, store.bytes, store.now);
}

// Prints the pending write, without its value, when a report ends the launch before the write happens.
void drop_store() {
    if (!pending) return;
    print_access(pending->now.verb.is, pending->first, pending->bytes, pending->now, "", pending->old);
    pending.reset();
}

bool is_outside(const char* first, std::size_t bytes) {
    if (const Region* region = region_of(first)) return first + bytes > region->data + region->bytes;
    const char* stop = end - shared_end < 64 ? shared_end : end;  // usually, shared variables are the last ones
    const bool of_program = first >= __executable_start && first < stop;
    return !of_program && cuda_on_cpu::stack_owner(first) < 0;
}

void trace_outside(const char* first, std::size_t bytes, const Doing& now) {
    if (!is_outside(first, bytes)) return;
    const int thread = now.access.thread;
    met({{block, thread}});
    if (trace.follows(thread)) print_access(now.verb.is, first, bytes, now, "outside");
    if (trace.finds() || trace.follows(thread)) _exit(3);
}

// Returns whether TRACE names a byte of the written bytes.
bool is_of_wrote(const char* first, std::size_t bytes) {
    if (trace.until.compare(0, 6, "wrote:") != 0) return false;
    const Region* region = region_of(first);
    const std::string begin = region ? "wrote:" + region->name + ":" : "";
    if (!region || trace.until.compare(0, begin.size(), begin) != 0) return false;
    const std::size_t byte = std::strtoull(trace.until.c_str() + begin.size(), nullptr, 10);
    const std::size_t start = first - region->data;
    return byte >= start && byte < start + bytes;
}

// Traces an access that happens now. Returns whether races.cpp checks it now.
bool trace_access(const char* first, std::size_t bytes, const Doing& now) {
    if (cuda_on_cpu::stack_owner(first) == now.access.thread) return false;  // such as a variable of an atomic function
    settle_store();
    if (trace.until == "outside") trace_outside(first, bytes, now);
    if (trace.finds() && now.writes && is_of_wrote(first, bytes)) met({{block, now.access.thread}});
    const bool known = region_of(first) || cuda_on_cpu::stack_owner(first) >= 0;  // or on another thread's stack
    const bool follows = known && trace.follows(now.access.thread);
    if (follows && now.writes) {
        const bool atomic = now.strong && now.verb.is == ATOMIC.is;
        pending = {first, bytes, now, atomic ? hexadecimal(first, bytes) : ""};
        return now.strong && trace.searches_races();
    }
    if (follows) print_access(now.verb.is, first, bytes, now, hexadecimal(first, bytes));
    return trace.searches_races();
}

// Traces an event of a thread that is no access.
void trace_event(int thread, const char* kind, const std::string& rest) {
    settle_store();
    if (trace.follows(thread)) print_step(block, thread, kind, rest);
}
