// Finds data races: two unordered accesses to a byte by different threads, at least one of them a write. This file is
// linked into programs that are compiled with -fsanitize=thread instead of AddressSanitizer, and defines the functions
// __tsan_read and __tsan_write that they call. libtsan itself, which observes threads of the system, is not linked.
//
// Vector clocks track the order of accesses. Accesses are ordered by:
//   - __syncthreads() within a block, and within a warp every exchange (__syncwarp(), shuffles) among the lanes of its
//     mask;
//   - a named barrier or mbarrier of PTX, which orders the threads that arrive before the threads that wait;
//   - a fence, then an atomic or volatile write, then an atomic or volatile read of the same address by another thread:
//     accesses that the first thread made, or knew to be complete, before its fence precede the reader's next accesses.
// Two accesses that are both atomic or volatile are not a race. A thread's plain access is ordered after all atomic
// accesses to the same address that precede an earlier atomic access of the thread to it.
//
// A plain read that races is harmless if the thread only compares the value: if the thread's next access to the address
// is an atomicCAS that expects the value read, the read counts as atomic. Until then, its races with atomic accesses
// are held. They are reported if the thread accesses the address in another way, reaches a barrier or ends.
//
// A note is a line on standard error about a possible mistake. The loader shows it only if a result is wrong.
#include "cuda_on_cpu.h"
#include "events.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

extern "C" {
extern char __data_start[] __attribute__((weak)), end[] __attribute__((weak));  // bounds of the program's variables
}

namespace {

constexpr int WARP = 32;

struct Access {
    int thread = -1;  // number of the thread in its block; -1: no access so far
    unsigned block, phase, clock;
    unsigned place;  // address of the code; programs are linked to addresses below 4 GiB
};

struct Read : Access {
    char value;
    bool last;  // its thread has not accessed the byte after this read
};

struct Byte {
    // The last write, and three reads: the last, the last by another thread of its warp, the last by another warp.
    Access written;
    Read read[3];
};

struct StrongAccess {
    Access access;
    const char* was;  // verb in the past tense, for reports
};

struct Strong {  // the last atomic or volatile accesses to a byte by two different threads
    StrongAccess written[2], read[2];
};

constexpr std::size_t PAGE = 256;

struct Page {  // the access history of PAGE bytes of a region
    unsigned turn;  // turn of the block that has created the page
    Byte bytes[PAGE];
};

enum class Kind { argument, shared, dynamic, variables };

struct Region {
    Kind kind;
    std::string name;
    const char* data;
    std::size_t bytes, element;
    std::vector<std::unique_ptr<Page>> pages;  // null until a byte of the page is accessed
    std::unordered_map<std::size_t, Strong> strong;

    bool of_block() const { return kind == Kind::shared || kind == Kind::dynamic; }
    Byte& history(std::size_t byte);
};

struct Known {  // complete accesses of a block: all before `phase`, and accesses of each thread up to its clock
    unsigned phase = 0;
    std::vector<unsigned> clocks;

    void join(const Known& other) {
        phase = std::max(phase, other.phase);
        if (clocks.size() < other.clocks.size()) clocks.resize(other.clocks.size());
        for (std::size_t i = 0; i < other.clocks.size(); ++i) clocks[i] = std::max(clocks[i], other.clocks[i]);
    }
};

typedef std::map<unsigned, Known> Blocks;  // number of a block -> its complete accesses

void join(Blocks& blocks, const Blocks& others) {
    for (const auto& [number, known] : others) blocks[number].join(known);
}

struct Verb {
    const char *is, *was;
};

constexpr Verb READS = {"reads", "read"}, WRITES = {"writes", "wrote"};
constexpr Verb ATOMIC = {"atomically changes", "atomically changed"};
constexpr Verb ATOMIC_READ = {"atomically reads", "atomically read"};
constexpr Verb VOLATILE_READ = {"reads (volatile)", "read (volatile)"};
constexpr Verb VOLATILE_WRITE = {"writes (volatile)", "wrote (volatile)"};

struct Doing {  // the access that happens now
    Access access;
    Verb verb;
    bool writes, strong;
};

struct Race {
    const Region* region;
    std::size_t byte;
    Access before;
    const char* was;  // verb of `before` in the past tense
    Doing now;
};

struct Held {  // a race of a plain read that is held, as an atomicCAS may still compare the value
    Race race;
    char value;
};

struct Thread {
    unsigned of[WARP];  // lane of the warp -> clock of its last access that is known to be complete
    bool ended;
    const void* made_way_at;  // address of the last atomicCAS before which the thread yielded; null: it did not
    std::vector<Held> held;
    // Complete accesses: `learnt` by atomic and volatile reads; made visible by fences to other threads of the block
    // (fenced_for_block) and to all threads (fenced_for_all). Threads that synchronize merge all three.
    enum Fact { learnt, fenced_for_block, fenced_for_all, FACTS };
    Blocks facts[FACTS];
};

void share(Blocks (&common)[Thread::FACTS], const Thread& thread) {
    for (int i = 0; i < Thread::FACTS; ++i) {
        if (!thread.facts[i].empty()) join(common[i], thread.facts[i]);
    }
}

void adopt(Thread& thread, const Blocks (&common)[Thread::FACTS]) {
    for (int i = 0; i < Thread::FACTS; ++i) {
        if (!common[i].empty()) thread.facts[i] = common[i];
    }
}

std::vector<Region> regions;
std::vector<Thread> threads;  // threads of the block
// Address -> accesses that its last strong writes made visible: [0] to threads of the block, [1] to all threads.
std::unordered_map<const void*, Blocks> told[2];
std::map<const void*, Blocks[Thread::FACTS]> meetings;  // facts of the threads that have arrived
unsigned block, phase, turn;  // turn: position of the block in the order in which blocks run
const char* dynamic_name = nullptr;
std::size_t dynamic_element = 1;

// Returns the access history of a byte. In shared memory, a page with the history of another block is replaced first.
Byte& Region::history(std::size_t byte) {
    std::unique_ptr<Page>& page = pages[byte / PAGE];
    if (!page || (of_block() && page->turn != turn)) page = std::make_unique<Page>();
    page->turn = turn;
    return page->bytes[byte % PAGE];
}

std::string at(int thread) {
    const unsigned n = thread, x = n % blockDim.x, y = n / blockDim.x % blockDim.y, z = n / blockDim.x / blockDim.y;
    return "thread (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

// Writes an address in braces, which the loader replaces by the source line, or by the name of the variable.
std::string line_of(unsigned place) {
    char text[32];
    std::snprintf(text, sizeof text, "{0x%x}", place);
    return text;
}

std::string name_of(const Region& region, std::size_t byte) {
    if (region.kind == Kind::shared || region.kind == Kind::variables) {
        char text[48];
        std::snprintf(text, sizeof text, "{variable %p}", static_cast<const void*>(region.data + byte));
        return text;
    }
    return region.name + "[" + std::to_string(byte / region.element) + "]";
}

bool ordered(const Access& before, int thread, const Region& region) {
    if (before.thread < 0) return true;
    const Thread& self = threads[thread];
    if (before.block == block) {
        if (before.thread == thread || before.phase < phase) return true;
        if (before.thread / WARP == thread / WARP && self.of[before.thread % WARP] >= before.clock) return true;
    } else if (region.of_block()) {
        return true;
    }
    const Blocks& learnt = self.facts[Thread::learnt];
    const auto known = learnt.find(before.block);
    if (known == learnt.end()) return false;
    const std::vector<unsigned>& clocks = known->second.clocks;
    if (before.phase < known->second.phase) return true;
    return std::size_t(before.thread) < clocks.size() && clocks[before.thread] >= before.clock;
}

#include "trace.h"

[[noreturn]] void report(const Race& race) {
    const auto& [region, byte, before, was, now] = race;
    drop_store();
    met({{now.access.block, now.access.thread}, {before.block, before.thread}});
    const bool same = before.block == block;
    std::fprintf(stderr, "cuda_on_cpu: race in %s: %s %s %s at %s; %s%s %s it at %s, and %s\n",
                 cuda_on_cpu::kernel_name(), at(now.access.thread).c_str(), now.verb.is, name_of(*region, byte).c_str(),
                 line_of(now.access.place).c_str(), at(before.thread).c_str(), same ? "" : " of another block",
                 was, line_of(before.place).c_str(),
                 same ? "no barrier is between them" : "nothing orders two blocks");
    _exit(3);
}

void note(bool& said, const std::string& text) {
    if (!said) std::fprintf(stderr, "cuda_on_cpu: note: %s\n", text.c_str());
    said = true;
}

void note_unwritten(const Region& region, std::size_t byte, const Doing& now) {
    static bool said;
    note(said, at(now.access.thread) + " reads " + name_of(region, byte) + " at " + line_of(now.access.place) +
                   ", which no thread has written");
    if (trace.until != "unwritten") return;
    met({{block, now.access.thread}});
    _exit(3);
}

void note_volatile(const Region& region, std::size_t byte, const Access& before, const Doing& now) {
    static bool said;
    note(said, at(now.access.thread) + " " + now.verb.is + " " + name_of(region, byte) + " at " +
                   line_of(now.access.place) + " and " + at(before.thread) + " changed it at " +
                   line_of(before.place) + ": volatile orders no threads, which __syncwarp() does");
}

// Adds an access to the last accesses of two different threads.
void keep(StrongAccess (&kept)[2], const StrongAccess& now) {
    if (kept[0].access.thread != now.access.thread || kept[0].access.block != now.access.block) kept[1] = kept[0];
    kept[0] = now;
}

void keep_read(Read (&kept)[3], const Read& now) {
    const Read last = kept[0];
    if (last.thread >= 0 && (last.thread != now.thread || last.block != now.block)) {
        const bool same_warp = last.block == now.block && last.thread / WARP == now.thread / WARP;
        kept[same_warp ? 1 : 2] = last;
    }
    kept[0] = now;
}

bool is_of(const Access& access, int thread) { return access.thread == thread && access.block == block; }

// Returns whether the thread of a plain read may still compare the value with an atomicCAS.
bool may_compare(const Read& read) {
    return read.block == block && read.phase == phase && read.last && !threads[read.thread].ended;
}

const Held* held_at(int thread, const Region& region, std::size_t byte) {
    for (const Held& held : threads[thread].held) {
        if (held.race.region == &region && held.race.byte == byte) return &held;
    }
    return nullptr;
}

void hold(int thread, const Held& held) {
    if (!held_at(thread, *held.race.region, held.race.byte)) threads[thread].held.push_back(held);
}

// Called before an access that is not an atomicCAS: reports the held race of the thread's plain read of the byte.
void settle(const Region& region, std::size_t byte, Byte& history, int thread) {
    if (const Held* held = held_at(thread, region, byte)) report(held->race);
    for (Read& read : history.read) {
        if (is_of(read, thread)) read.last = false;
    }
}

void check_reads(const Region& region, std::size_t i, const Byte& byte, const Doing& now, bool volatile_) {
    for (const Read& read : byte.read) {
        if (ordered(read, now.access.thread, region)) continue;
        const Race race = {&region, i, read, READS.was, now};
        if (!now.strong || volatile_ || !may_compare(read)) report(race);
        hold(read.thread, {race, read.value});
    }
}

// Checks a plain access against an earlier atomic or volatile write.
void check_after(const Region& region, std::size_t i, const StrongAccess& written, const Doing& now) {
    if (ordered(written.access, now.access.thread, region)) return;
    const Race race = {&region, i, written.access, written.was, now};
    if (now.writes || written.was != ATOMIC.was) report(race);
    hold(now.access.thread, {race, region.data[i]});
}

void check_plain(const Region& region, std::size_t i, const Strong& strong, const Doing& now) {
    const auto& [last, other] = strong.written;
    // If the last atomic access is by this thread, it has seen all earlier ones: atomic accesses have a single order.
    const bool own = is_of(last.access, now.access.thread) && last.was == ATOMIC.was;
    check_after(region, i, last, now);
    if (!own) check_after(region, i, other, now);
    for (const auto& [before, was] : strong.read) {
        if (now.writes && !ordered(before, now.access.thread, region)) report({&region, i, before, was, now});
    }
}

void check_byte(Region& region, std::size_t i, const Doing& now, bool volatile_) {
    const int thread = now.access.thread;
    Byte& byte = region.history(i);
    settle(region, i, byte, thread);
    if (!ordered(byte.written, thread, region)) report({&region, i, byte.written, WRITES.was, now});
    if (now.writes) check_reads(region, i, byte, now, volatile_);
    const auto found = region.strong.empty() ? region.strong.end() : region.strong.find(i);
    const bool unwritten = byte.written.thread < 0 && found == region.strong.end();
    if (unwritten && !now.writes && region.of_block()) note_unwritten(region, i, now);
    if (!now.strong) {
        if (found != region.strong.end()) check_plain(region, i, found->second, now);
        now.writes ? void(byte.written = now.access) : keep_read(byte.read, {now.access, region.data[i], true});
        return;
    }
    Strong& strong = found != region.strong.end() ? found->second : region.strong[i];
    if (volatile_ && region.of_block()) {
        const Access& last = strong.written[0].access;
        const bool near = last.thread >= 0 && last.block == block && last.thread / WARP == thread / WARP;
        if (near && !ordered(last, thread, region)) note_volatile(region, i, last, now);
    }
    keep(now.writes ? strong.written : strong.read, {now.access, now.verb.was});
}

Region* region_of(const char* address) {
    for (Region& region : regions) {
        if (address >= region.data && address < region.data + region.bytes) return &region;
    }
    return nullptr;
}

void check_stack(const void* address, const Doing& now) {
    const int owner = cuda_on_cpu::stack_owner(address), thread = now.access.thread;
    if (owner < 0 || owner == thread) return;
    met({{block, thread}, {block, owner}});
    std::fprintf(stderr, "cuda_on_cpu: race in %s: %s %s a local variable of %s at %s: each thread has its own ones, "
                 "which no other can reach\n", cuda_on_cpu::kernel_name(), at(thread).c_str(), now.verb.is,
                 at(owner).c_str(), line_of(now.access.place).c_str());
    _exit(3);
}

void check_access(const char* first, std::size_t bytes, const Doing& now) {
    Region* region = region_of(first);
    if (!region) return check_stack(first, now);
    const std::size_t start = first - region->data, stop = std::min(start + bytes, region->bytes);
    const bool volatile_ = now.strong && now.verb.is != ATOMIC.is && now.verb.is != ATOMIC_READ.is;
    for (std::size_t i = start; i < stop; ++i) check_byte(*region, i, now, volatile_);
}

void record(const void* address, std::size_t bytes, Verb verb, bool writes, bool strong, void* place) {
    const int thread = cuda_on_cpu::thread_number();
    if (thread < 0) return;
    const char* first = static_cast<const char*>(address);
    const unsigned from = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(place));
    const Doing now = {{thread, block, phase, threads[thread].of[thread % WARP], from}, verb, writes, strong};
    if (!tracing || trace_access(first, bytes, now)) check_access(first, bytes, now);
}

// Returns the thread's accesses until now, and all accesses that it knows to be complete.
Blocks knowledge(int thread) {
    const Thread& self = threads[thread];
    Blocks all = self.facts[Thread::learnt];
    Known own = {phase, std::vector<unsigned>(threads.size())};
    const std::size_t warp = thread / WARP * WARP;
    for (std::size_t i = warp; i < threads.size() && i < warp + WARP; ++i) own.clocks[i] = self.of[i - warp];
    all[block].join(own);
    return all;
}

void learn(int thread, const void* address) {
    for (int all = 0; all < 2; ++all) {
        const auto found = told[all].find(address);
        if (found != told[all].end()) join(threads[thread].facts[Thread::learnt], found->second);
    }
}

void tell(int thread, const void* address, bool instead) {
    for (int all = 0; all < 2; ++all) {
        const Blocks& fenced = threads[thread].facts[Thread::fenced_for_block + all];
        if (instead) told[all].erase(address);
        if (!fenced.empty()) join(told[all][address], fenced);
    }
}

Region made(Kind kind, const char* name, const void* data, std::size_t bytes, std::size_t element) {
    return {kind, name, static_cast<const char*>(data), bytes, element,
            std::vector<std::unique_ptr<Page>>((bytes + PAGE - 1) / PAGE), {}};
}

void report_held(const Thread& thread) {
    if (!thread.held.empty()) report(thread.held.front().race);
}

// Returns the value of the thread's plain read of a byte, if the thread has not accessed the byte afterwards.
std::optional<char> last_read(Region& region, std::size_t byte, int thread) {
    if (const Held* held = held_at(thread, region, byte)) return held->value;
    for (const Read& read : region.history(byte).read) {
        if (is_of(read, thread) && may_compare(read)) return read.value;
    }
    return {};
}

// Turns the thread's last plain read of a byte into an atomic read, and drops its held races.
void make_atomic(Region& region, std::size_t byte, int thread) {
    std::vector<Held>& held = threads[thread].held;
    const auto here = [&](const Held& each) { return each.race.region == &region && each.race.byte == byte; };
    held.erase(std::remove_if(held.begin(), held.end(), here), held.end());
    for (Read& read : region.history(byte).read) {
        if (!is_of(read, thread) || !may_compare(read)) continue;
        keep(region.strong[byte].read, {read, READS.was});
        read = {};
    }
}

// Adds the regions that every launch has in addition to its arguments. Shared variables come first, as they lie within
// the region of the program's variables.
void watch_variables(const void* dynamic, std::size_t bytes) {
    if (std::getenv("VARIABLES")) {
        regions.push_back(made(Kind::variables, "", __data_start, end - __data_start, 1));
    }
    regions.insert(regions.begin(), made(Kind::shared, "", shared_begin, shared_end - shared_begin, 1));
    if (bytes) {
        const char* name = dynamic_name ? dynamic_name : "the dynamic shared memory";
        regions.push_back(made(Kind::dynamic, name, dynamic, bytes, dynamic_element));
    }
}

}  // namespace

void cuda_on_cpu::watch(const char* name, const void* data, std::size_t bytes, std::size_t element) {
    regions.push_back(made(Kind::argument, name, data, bytes, element));
}

void cuda_on_cpu::name_dynamic(const char* name, std::size_t element) {
    dynamic_name = name;
    dynamic_element = element;
    for (Region& region : regions) {
        if (region.kind == Kind::dynamic) region.name = name, region.element = element;
    }
}

void cuda_on_cpu::block_begins(unsigned number, std::size_t count, const void* dynamic, std::size_t bytes) {
    if (threads.empty()) watch_variables(dynamic, bytes);
    for (Region& region : regions) {
        if (region.of_block()) region.strong.clear();
    }
    threads.assign(count, {});
    for (std::size_t i = 0; i < count; ++i) threads[i].of[i % WARP] = 1;
    told[0].clear();
    meetings.clear();
    for (auto it = told[1].begin(); it != told[1].end();) {  // forget this block's shared memory
        const Region* region = region_of(static_cast<const char*>(it->first));
        it = region && region->of_block() ? told[1].erase(it) : std::next(it);
    }
    block = number;
    phase = 0;
    ++turn;
}

void cuda_on_cpu::barrier_opens() {
    if (tracing) {
        for (std::size_t i = 0; i < threads.size(); ++i) trace_event(i, "passes", "");
    }
    for (const Thread& thread : threads) report_held(thread);
    ++phase;
    Blocks common[Thread::FACTS];
    for (const Thread& thread : threads) share(common, thread);
    for (Thread& thread : threads) adopt(thread, common);
}

void cuda_on_cpu::thread_ends() {
    Thread& thread = threads[thread_number()];
    if (tracing) trace_event(thread_number(), "returns", "");
    report_held(thread);
    thread.ended = true;
}

void cuda_on_cpu::thread_waits(const char* file, int line, const char* kind, unsigned mask, std::uint64_t value,
                               char type) {
    if (!tracing) return;
    char text[64];
    std::snprintf(text, sizeof text, ":%d\t0x%08x\t%016llx\t%c", line, mask, static_cast<unsigned long long>(value),
                  type);
    trace_event(thread_number(), kind, file + std::string(text));
}

void cuda_on_cpu::value_comes(std::size_t thread, int source, bool takes_part, std::uint64_t value, char type) {
    if (!tracing) return;
    char text[64];
    std::snprintf(text, sizeof text, "%d\t%d\t%016llx\t%c", source, takes_part,
                  static_cast<unsigned long long>(value), type);
    trace_event(thread, "receives", text);
}

void cuda_on_cpu::barrier_diverges(std::size_t a, std::size_t b) {
    drop_store();
    met({{block, a}, {block, b}});
}

void cuda_on_cpu::lanes_meet(std::size_t first, unsigned lanes) {
    unsigned joined[WARP] = {};
    Blocks common[Thread::FACTS];
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const Thread& thread = threads[first + __builtin_ctz(rest)];
        for (int k = 0; k < WARP; ++k) joined[k] = std::max(joined[k], thread.of[k]);
        share(common, thread);
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        Thread& thread = threads[first + lane];
        std::copy(joined, joined + WARP, thread.of);
        ++thread.of[lane];
        adopt(thread, common);
    }
}

void cuda_on_cpu::meeting_begins(const void* meeting) { meetings.erase(meeting); }

void cuda_on_cpu::thread_arrives(const void* meeting, int thread) {
    Thread& self = threads[thread];
    report_held(self);
    Blocks(&common)[Thread::FACTS] = meetings[meeting];
    share(common, self);
    join(common[Thread::learnt], knowledge(thread));
    ++self.of[thread % WARP];  // accesses from now on are after the arrival
}

void cuda_on_cpu::thread_learns(const void* meeting, int thread) {
    for (int i = 0; i < Thread::FACTS; ++i) join(threads[thread].facts[i], meetings[meeting][i]);
}

void cuda_on_cpu::atomic_access(const void* address, std::size_t bytes, void* place) {
    const int thread = thread_number();
    if (thread < 0) return;
    record(address, bytes, ATOMIC, true, true, place);
    learn(thread, address);
    tell(thread, address, false);
}

void cuda_on_cpu::atomic_load(const void* address, std::size_t bytes, void* place) {
    const int thread = thread_number();
    if (thread < 0) return;
    record(address, bytes, ATOMIC_READ, false, true, place);
    learn(thread, address);
}

bool cuda_on_cpu::read_is_compared(const void* address, std::size_t bytes, std::uint64_t expected) {
    const int thread = thread_number();
    const char* first = static_cast<const char*>(address);
    if (tracing) settle_store();
    Region* region = thread < 0 ? nullptr : region_of(first);
    if (!region) return false;
    const std::size_t start = first - region->data, stop = std::min(start + bytes, region->bytes);
    const char* values = reinterpret_cast<const char*>(&expected);
    for (std::size_t i = start; i < stop; ++i) {
        if (last_read(*region, i, thread) != values[i - start]) return false;
    }
    for (std::size_t i = start; i < stop; ++i) make_atomic(*region, i, thread);
    const void*& at = threads[thread].made_way_at;
    at = at == address ? nullptr : address;
    return at != nullptr;
}

void cuda_on_cpu::read_only_access(const void* address, std::size_t bytes, void* place) {
    const int thread = thread_number();
    const char* first = static_cast<const char*>(address);
    if (tracing) settle_store();
    Region* region = thread < 0 ? nullptr : region_of(first);
    if (!region || region->of_block() || !trace.searches_races()) return;
    const std::size_t start = first - region->data, stop = std::min(start + bytes, region->bytes);
    for (std::size_t i = start; i < stop; ++i) {
        const auto strong = region->strong.find(i);
        const bool atomic = strong != region->strong.end() && strong->second.written[0].access.thread >= 0;
        const Access& written = atomic ? strong->second.written[0].access : region->history(i).written;
        if (written.thread < 0) continue;
        const unsigned from = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(place));
        met({{block, thread}, {written.block, written.thread}});
        if (trace.follows(thread)) {
            const Access load = {thread, block, phase, 0, from};
            print_access("reads", first, bytes, {load, READS, false, false}, hexadecimal(first, bytes));
        }
        std::fprintf(stderr, "cuda_on_cpu: read-only load in %s: %s reads %s at %s by the read-only cache, and %s%s "
                     "wrote it at %s: the cache may hold the old value until the kernel ends\n", kernel_name(),
                     at(thread).c_str(), name_of(*region, i).c_str(), line_of(from).c_str(), at(written.thread).c_str(),
                     written.block == block ? "" : " of another block", line_of(written.place).c_str());
        _exit(3);
    }
}

void cuda_on_cpu::fence_passed(bool of_device) {
    const int thread = thread_number();
    if (tracing) trace_event(thread, of_device ? "fence" : "fence of the block", "");
    Thread& self = threads[thread];
    join(self.facts[Thread::fenced_for_block], knowledge(thread));
    if (of_device) join(self.facts[Thread::fenced_for_all], self.facts[Thread::fenced_for_block]);
    ++self.of[thread % WARP];  // accesses from now on are after the fence
}

namespace {

void record_volatile(const void* address, std::size_t bytes, bool writes, void* place) {
    const int thread = cuda_on_cpu::thread_number();
    if (thread < 0) return;
    record(address, bytes, writes ? VOLATILE_WRITE : VOLATILE_READ, writes, true, place);
    writes ? tell(thread, address, true) : learn(thread, address);
}

}  // namespace

// Functions that the instrumented code of kernels calls.
#define ACCESS(name, n, recorded) \
    void __tsan_##name##n(void* p) { recorded; }
#define HERE __builtin_return_address(0)
#define ACCESSES(n)                                                                                      \
    ACCESS(read, n, record(p, n, READS, false, false, HERE))                                             \
    ACCESS(write, n, record(p, n, WRITES, true, false, HERE))                                            \
    ACCESS(unaligned_read, n, record(p, n, READS, false, false, HERE))                                   \
    ACCESS(unaligned_write, n, record(p, n, WRITES, true, false, HERE))                                  \
    ACCESS(volatile_read, n, record_volatile(p, n, false, HERE))                                         \
    ACCESS(volatile_write, n, record_volatile(p, n, true, HERE))                                         \
    ACCESS(unaligned_volatile_read, n, record_volatile(p, n, false, HERE))                               \
    ACCESS(unaligned_volatile_write, n, record_volatile(p, n, true, HERE))

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, std::size_t n) { record(p, n, READS, false, false, HERE); }
void __tsan_write_range(void* p, std::size_t n) { record(p, n, WRITES, true, false, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
char __tsan_atomic8_load(const char* guard, int) { return *guard; }  // reads the guard of a function's static variable
}
