// Runs kernel launches. Command-line words describe a launch, standard input contains its arguments, and the arrays are
// written to standard output. A failure is reported on standard error and ends the process. Without words, the program
// waits for launches (programs.py) and runs one after the other.
//
// Blocks run one after the other. The threads of a block are fibers: a fiber runs until it waits at a barrier or
// returns, then the next fiber in the order runs. When all fibers have stopped, the barrier opens and the next phase
// begins. This file is compiled without AddressSanitizer, the kernels with it.
//
// A thread may wait in a loop for another thread, for a flag or a lock. Therefore programs with atomics or volatile
// accesses count the basic blocks that they run (-fsanitize-coverage=trace-pc), and a thread that runs long yields.
//
// A launch that overlaps the previous kernel (kernels_cu/lib/overlap.cuh) has late arrays, which earlier kernels may
// write. They are poisoned for a thread until it waits for the previous kernel, or passes a barrier after another
// thread has waited.
#include <cmath>  // must precede cuda_on_cpu.h, which leaves out a part of <cmath>

#include "cuda_on_cpu.h"
#include "events.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
int cuda_on_cpu::uninterrupted;

__attribute__((noinit)) char shared_begin[32];

extern "C" {
// abort_on_error: makes both sanitizers end the process with SIGABRT.
const char* __asan_default_options() {
    return "abort_on_error=1:detect_leaks=0:detect_stack_use_after_return=0:print_legend=0:quarantine_size_mb=16";
}
const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
}

namespace {

constexpr std::size_t STACK = 256 << 10;  // AddressSanitizer also writes its reports on a fiber's stack
constexpr int WARP = 32;

enum class State { ready, at_barrier, at_exchange, at_named, returned };

struct Thread {
    uint3 index;
    State state;
    const char* file;  // file of the barrier or exchange at which the thread waits
    int line;
    int passed;  // number of barriers and exchanges that the thread has passed
    std::size_t path;  // with exact_places: hash of the call path to the barrier or exchange
    unsigned mask;  // mask of the exchange; 0: __activemask, the lanes that meet at this place
    int delay;
    std::uint64_t value;
    cuda_on_cpu::Sought sought;  // what the thread receives in the exchange
    cuda_on_cpu::Gathered gathered;  // values of the last exchange in which this is the first lane
    const cuda_on_cpu::Gathered* received;
    int id;           // number of the named barrier
    unsigned number;  // number of threads that the named barrier expects
    bool waits;       // at the named barrier, instead of only arriving
    bool counted;     // the thread's warp has arrived at the named barrier
    bool polls;       // the thread's turn has ended with a test of an mbarrier
    char* stack;
    bool started;
    void* resume_point[5];
};

struct Array {  // an argument; data is null for numbers, null pointers and repeated arrays
    const char* name;
    char* data;
    std::size_t bytes, margin;  // poisoned bytes on each side
    bool late;
};

struct Named {  // a barrier of PTX (bar.sync) at which some warps meet
    unsigned number, arrived;  // expected threads, and threads that have arrived
};

const cuda_on_cpu::Entry* kernel;
std::vector<std::uint64_t> slots;
std::vector<Array> arrays;
constexpr std::size_t MOST_SIZES = 64;
std::map<std::size_t, std::vector<char*>> unused;  // size in bytes -> free arrays of earlier launches
std::vector<Thread> threads;
Thread* current;  // null while the scheduler runs
bool overlaps;             // the launch overlaps the previous kernel
bool waited;               // a thread of the block has waited for the previous kernel
bool late_visible = true;  // late arrays are not poisoned
void* dynamic;             // dynamic shared memory of the block
std::size_t dynamic_bytes;
int fill = 0xFF;    // byte that fills shared memory before the first write
bool exact_places;  // the program is not optimised: barriers are distinguished by their call paths
char* stacks;       // stacks of all threads
int count;          // number of threads whose predicate was true at the last barrier
unsigned steps;     // basic blocks that the thread has run in this turn
constexpr unsigned LONG_TURN = 100'000, SHORT_TURN = 300;
unsigned turn;  // limit of steps per turn; 1,000 as soon as a thread has reached the limit
bool spins;     // a thread has reached the limit
void* scheduler_point[5];
Named named[16];
int idle;  // number of rounds in which threads only tested mbarriers

std::string at(uint3 i) {
    return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

[[noreturn]] void fail(const std::string& message) {
    std::fprintf(stderr, "cuda_on_cpu: %s\n", message.c_str());
    _exit(3);
}

std::string describe(const Thread& thread) {
    const std::string name = "thread " + at(thread.index), line = std::to_string(thread.line);
    const std::string passed = " after " + std::to_string(thread.passed) + " barriers";
    if (thread.state == State::returned) return name + " has returned" + passed;
    char mask[32] = "";
    if (thread.state == State::at_exchange) std::snprintf(mask, sizeof mask, " with mask 0x%08x", thread.mask);
    if (thread.state == State::at_named) {
        const unsigned came = thread.counted ? named[thread.id].arrived : 0;
        std::snprintf(mask, sizeof mask, " (%u of %u threads arrive)", came, thread.number);
    }
    return name + " waits at " + thread.file + ":" + line + mask + passed;
}

[[noreturn]] void divergent(const Thread& a, const Thread& b) {
    if (cuda_on_cpu::barrier_diverges) cuda_on_cpu::barrier_diverges(&a - threads.data(), &b - threads.data());
    const bool one_line = a.line == b.line && a.state == b.state && a.mask == b.mask && a.passed == b.passed;
    fail(std::string("divergent barrier in ") + kernel->name + ", block " + at(blockIdx) + ": " + describe(a) +
         ", " + describe(b) + (one_line ? ": two barriers in one line, or in two calls of a function" : ""));
}

[[noreturn]] void missing(const Thread& waits, const Thread& lane) {
    if (cuda_on_cpu::barrier_diverges) cuda_on_cpu::barrier_diverges(&waits - threads.data(), &lane - threads.data());
    fail(std::string("divergent barrier in ") + kernel->name + ", block " + at(blockIdx) + ": " + describe(waits) +
         ", " + describe(lane) + ": the mask names the lane of a thread that never comes");
}

// Called after a sanitizer's report. Prints the thread, and the argument that contains the address or is next to it.
void on_abort(int) {
    if (!current) _exit(4);
    const char* address = __asan_report_present() ? (const char*)__asan_get_report_address() : nullptr;
    for (const Array& array : arrays) {
        const char *first = array.data - array.margin, *last = array.data + array.bytes + array.margin;
        if (!array.data || address < first || address >= last) continue;
        const char* access = __asan_get_report_access_type() ? "WRITE" : "READ";
        const bool inside = address >= array.data && address < array.data + array.bytes;
        const char* wrong = inside && array.late && !late_visible ? "before wait_for_previous()" : "out of bounds";
        std::fprintf(stderr, "cuda_on_cpu: %s %s: byte %td of %s, which has %zu bytes\n", access, wrong,
                     address - array.data, array.name, array.bytes);
    }
    std::fprintf(stderr, "cuda_on_cpu: in %s, block %s, thread %s\n", kernel->name, at(blockIdx).c_str(),
                 at(threadIdx).c_str());
    _exit(4);
}

// Bytes left for text that kernels print to standard output, before the arrays; a GPU's buffer is limited, too.
constexpr std::size_t TEXT_ROOM = 1 << 20;
std::size_t text_room;
bool rehearses;  // the text of launches before the one that counts is not written

// A kernel that prints more ends the program: formatting its text would take minutes.
ssize_t write_text(void*, const char* text, std::size_t bytes) {
    const std::size_t kept = bytes < text_room ? bytes : text_room;
    const bool written = rehearses || write(STDOUT_FILENO, text, kept) >= 0;
    if (kept < bytes) _exit(7);
    text_room -= kept;
    return written ? bytes : 0;
}

std::size_t blocks_left;  // blocks of the launch that have not begun

// Called after the seconds of CPU time in TIME_LIMIT. Prints the line that the thread executes. In a loop with a barrier
// no thread may be running, so that the last barrier of the thread that has passed most barriers is printed, too.
void on_alarm(int) {
    std::fprintf(stderr, "cuda_on_cpu: %s does not end: block %s, thread %s still runs\n", kernel->name,
                 at(blockIdx).c_str(), at(threadIdx).c_str());
    __sanitizer_print_stack_trace();
    const Thread* most = nullptr;
    for (const Thread& thread : threads) {
        if (thread.state != State::returned && thread.file && (!most || thread.passed > most->passed)) most = &thread;
    }
    if (most) std::fprintf(stderr, "cuda_on_cpu: %s\n", describe(*most).c_str());
    if (blocks_left && spins) {
        std::fprintf(stderr, "cuda_on_cpu: the thread may wait for one of the %zu blocks that have not begun: only a "
                     "cooperative launch, which this is not, runs all blocks at the same time\n", blocks_left);
    }
    _exit(6);
}

void set_alarm(double seconds) {  // 0: no alarm
    const double us = 1e6 * seconds;
    const itimerval once = {{0, 0}, {time_t(us / 1e6), suseconds_t(std::fmod(us, 1e6))}};
    setitimer(ITIMER_PROF, &once, nullptr);
}

// GCC's built-in setjmp and longjmp. They save no signal mask, which would cost two system calls per switch of fibers.
// AddressSanitizer does not intercept them; after libc's longjmp it would assume that all frames have ended. Each is in
// a separate function that is never inlined, because GCC does not support both in one function.
[[noreturn]] __attribute__((noipa)) void jump_to(void** point) { __builtin_longjmp(point, 1); }

__attribute__((noipa)) void jump(void** from, void** to) {
    if (__builtin_setjmp(from) == 0) jump_to(to);
}

void stop_in(State state) {  // called on a fiber: switches to the scheduler, which resumes this thread later
    Thread& self = *current;
    self.state = state;
    jump(self.resume_point, scheduler_point);
}

void fiber() {
    for (;;) {  // one iteration per block
        kernel->call(slots.data());
        if (cuda_on_cpu::thread_ends) cuda_on_cpu::thread_ends();
        stop_in(State::returned);
    }
}

// ucontext sets up the new stack and is not used afterwards. The stacks of threads begin at different offsets: with the
// same offset, all of them would map to a few cache lines, and a switch to another thread would wait for memory.
__attribute__((noipa)) void start(Thread& thread) {
    thread.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack;
    context.uc_stack.ss_size = STACK - (&thread - threads.data()) % 64 * 320;
    makecontext(&context, fiber, 0);
    if (__builtin_setjmp(scheduler_point) == 0) setcontext(&context);
}

void show_late_arrays(bool visible) {
    if (visible == late_visible) return;
    for (const Array& array : arrays) {
        if (array.late) (visible ? __asan_unpoison_memory_region : __asan_poison_memory_region)(array.data, array.bytes);
    }
    late_visible = visible;
}

void resume(Thread& thread) {
    show_late_arrays(!overlaps || (waited && thread.passed > 0));
    current = &thread;
    threadIdx = thread.index;
    thread.polls = false;
    steps = 0;
    if (thread.started) {
        jump(scheduler_point, thread.resume_point);
    } else {
        start(thread);
    }
    current = nullptr;
}

// Lets the other threads run before this thread continues.
void make_way() {
    if (current) stop_in(State::ready);
}

// Returns a hash of the return addresses from this function up to the kernel.
__attribute__((noinline)) std::size_t call_path() {
    std::size_t path = 0;
    const char* frame = static_cast<const char*>(__builtin_frame_address(0));
    while (frame >= current->stack && frame + 2 * sizeof(void*) <= current->stack + STACK) {
        const char* const* words = reinterpret_cast<const char* const*>(frame);
        path = path * 31 + reinterpret_cast<std::uintptr_t>(words[1]);
        if (words[0] <= frame) break;
        frame = words[0];
    }
    return path;
}

void wait_at(const char* file, int line, const char* kind, unsigned mask = 0, std::uint64_t value = 0,
             char type = '?') {
    if (cuda_on_cpu::thread_waits) cuda_on_cpu::thread_waits(file, line, kind, mask, value, type);
    current->file = file;
    current->line = line;
    current->path = exact_places ? call_path() : 0;
}

bool same_place(const Thread& a, const Thread& b) {
    if (a.state != b.state || a.state == State::returned) return a.state == b.state;
    return a.line == b.line && a.path == b.path && (a.file == b.file || !std::strcmp(a.file, b.file));
}

void open(Thread& thread) {
    thread.state = State::ready;
    ++thread.passed;
}

// Exchanges the values of `lanes`, which all wait at the exchange, and makes these threads ready.
void meet(Thread* warp, unsigned lanes) {
    cuda_on_cpu::Gathered& gathered = warp[__builtin_ctz(lanes)].gathered;
    std::memset(gathered.values, fill, sizeof gathered.values);
    gathered.lanes = lanes;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Thread& thread = warp[__builtin_ctz(rest)];
        gathered.values[__builtin_ctz(rest)] = thread.value;
        thread.received = &gathered;
        open(thread);
    }
    if (cuda_on_cpu::lanes_meet) cuda_on_cpu::lanes_meet(warp - threads.data(), lanes);
    for (unsigned rest = cuda_on_cpu::value_comes ? lanes : 0; rest; rest &= rest - 1) {
        const Thread& thread = warp[__builtin_ctz(rest)];
        const auto [source, type] = thread.sought;
        if (source < 0) continue;
        cuda_on_cpu::value_comes(&thread - threads.data(), source, lanes >> source & 1, gathered.values[source], type);
    }
}

// Exchanges the values of the lanes of `first`'s mask if all of them wait. Returns false if a lane has not arrived yet.
bool exchange_group(Thread* warp, int lanes, const Thread& first) {
    const unsigned mask = first.mask;
    const Thread* returned = nullptr;
    unsigned met = 0;
    for (int i = 0; i < lanes; ++i) {
        if (!(mask >> i & 1)) continue;
        if (warp[i].state == State::returned) {
            returned = &warp[i];
            continue;
        }
        if (warp[i].state != State::at_exchange || !warp[i].mask || warp[i].delay) return false;
        if (warp[i].mask != mask || !same_place(warp[i], first)) divergent(first, warp[i]);
        met |= 1u << i;
    }
    if (returned) missing(first, *returned);
    meet(warp, met);
    return true;
}

// Completes an __activemask() for the lanes that wait at the same place, if no other lane of the warp can still arrive.
bool active_group(Thread* warp, int lanes) {
    unsigned met = 0;
    const Thread* first = nullptr;
    for (int i = 0; i < lanes; ++i) {
        if (warp[i].state == State::ready) return false;
        if (warp[i].state != State::at_exchange || warp[i].mask) continue;
        first = first ? first : &warp[i];
        if (same_place(*first, warp[i])) met |= 1u << i;
    }
    if (met) meet(warp, met);
    return met;
}

// Lets a warp arrive at a named barrier if all its threads have reached it, and opens the barrier for the last warp.
bool named_group(Thread* warp, int lanes) {
    Thread* first = nullptr;
    for (int i = 0; i < lanes; ++i) {
        if (warp[i].state == State::returned) continue;
        if (warp[i].state != State::at_named || warp[i].counted) return false;
        if (!first) first = &warp[i];
        if (!same_place(*first, warp[i])) divergent(*first, warp[i]);
    }
    if (!first) return false;
    Named& barrier = named[first->id];
    if (barrier.arrived && barrier.number != first->number) {
        fail("the threads expect " + std::to_string(barrier.number) + " and " + std::to_string(first->number) +
             " threads at barrier " + std::to_string(first->id) + ": " + describe(*first));
    }
    if (!barrier.arrived && cuda_on_cpu::meeting_begins) cuda_on_cpu::meeting_begins(&barrier);
    barrier = {first->number, barrier.arrived + WARP};
    for (int i = 0; i < lanes; ++i) {
        if (warp[i].state == State::returned) continue;
        if (cuda_on_cpu::thread_arrives) cuda_on_cpu::thread_arrives(&barrier, &warp[i] - threads.data());
        if (!(warp[i].counted = warp[i].waits)) open(warp[i]);
    }
    if (barrier.arrived < barrier.number) return true;
    for (Thread& thread : threads) {
        if (thread.state != State::at_named || !thread.counted || thread.id != first->id) continue;
        if (cuda_on_cpu::thread_learns) cuda_on_cpu::thread_learns(&barrier, &thread - threads.data());
        thread.counted = false;
        open(thread);
    }
    barrier = {};
    return true;
}

// Ends the program if a thread waits for an event that no other thread can cause.
void check_stuck() {
    bool polls = true;
    const Thread* stuck = nullptr;
    for (const Thread& thread : threads) {
        if (thread.state == State::ready) polls &= thread.polls, stuck = &thread;
    }
    if (stuck && (!polls || ++idle < 1'000)) return;
    for (const Thread& thread : threads) {
        if (!stuck && thread.state == State::at_named) stuck = &thread;
    }
    if (!stuck) return;
    for (const Thread& thread : threads) {
        if (!same_place(*stuck, thread)) divergent(*stuck, thread);
    }
    fail(std::string("divergent barrier in ") + kernel->name + ", block " + at(blockIdx) + ": all threads wait: " +
         describe(*stuck));
}

// Called when all threads have stopped. Makes ready the threads that may continue. Returns false if all have returned.
bool open_barriers() {
    bool any = false;
    for (std::size_t w = 0; w < threads.size(); w += WARP) {
        const int lanes = threads.size() - w < WARP ? threads.size() - w : WARP;
        bool asked = false, opened = false;
        for (int i = 0; i < lanes; ++i) {
            Thread& thread = threads[w + i];
            if (thread.state != State::at_exchange) continue;
            if (!thread.mask) {
                asked = true;
            } else if (thread.delay) {
                --thread.delay;
                opened = true;
            } else {
                opened |= exchange_group(&threads[w], lanes, thread);
            }
        }
        any |= opened || (asked && active_group(&threads[w], lanes)) || named_group(&threads[w], lanes);
    }
    if (any) return true;
    check_stuck();
    for (const Thread& thread : threads) {
        if (thread.state == State::ready) return true;  // the thread has yielded
    }
    for (const Thread& thread : threads) {
        if (!same_place(threads[0], thread)) divergent(threads[0], thread);
    }
    if (threads[0].state == State::returned) return false;
    count = 0;
    for (Thread& thread : threads) {
        count += thread.value;
        open(thread);
    }
    if (cuda_on_cpu::barrier_opens) cuda_on_cpu::barrier_opens();
    return true;
}

struct Order {
    bool reverse, shuffled;
    std::uint64_t seed;
    std::vector<std::size_t> places;  // the last returned order

    const std::vector<std::size_t>& next(std::size_t n) {
        if (places.size() == n && !shuffled) return places;
        places.resize(n);
        for (std::size_t i = 0; i < n; ++i) places[i] = reverse ? n - 1 - i : i;
        for (std::size_t i = n; shuffled && i > 1; --i) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            std::swap(places[i - 1], places[(seed >> 33) % i]);
        }
        return places;
    }
};

void (*firsts[4])();  // functions to call before each block

void run_block(Order& order, unsigned number) {
    for (void (*first)() : firsts) {
        if (first) first();
    }
    // Written byte by byte through volatile: AddressSanitizer intercepts memset and would report the redzones.
    for (volatile char* p = shared_begin; p != shared_end; p = p + 1) *p = (char)fill;
    std::memset(dynamic, fill, dynamic_bytes);
    for (Thread& thread : threads) {
        thread.state = State::ready;
        thread.passed = 0;
        thread.counted = false;
    }
    for (Named& barrier : named) barrier = {};
    idle = 0;
    waited = !overlaps;
    if (cuda_on_cpu::block_begins) cuda_on_cpu::block_begins(number, threads.size(), dynamic, dynamic_bytes);
    do {
        for (std::size_t i : order.next(threads.size())) {
            if (threads[i].state == State::ready) resume(threads[i]);
        }
    } while (open_barriers());
    if (!waited) fail(std::string(kernel->name) + ", block " + at(blockIdx) + ": no thread waits for the previous kernel");
}

// Replaces the threads of a previous launch that had another number of threads.
void map_threads(std::size_t number) {
    if (!threads.empty()) munmap(stacks, threads.size() * STACK);
    threads.assign(number, {});
    // Pages are allocated at the first access. The first page of a stack is not accessible, to detect an overflow.
    constexpr int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, number * STACK, PROT_READ | PROT_WRITE, anonymous, -1, 0);
    stacks = static_cast<char*>(memory);
    for (std::size_t i = 0; i < number; ++i) {
        threads[i].stack = stacks + i * STACK;
        if (memory == MAP_FAILED || mprotect(threads[i].stack, 4096, PROT_NONE)) fail("no memory for the stacks");
    }
    // Tell AddressSanitizer that all stacks are one stack, so that switches need not be reported to it. The scheduler
    // runs on another stack, but is compiled without AddressSanitizer.
    void* other;
    __sanitizer_start_switch_fiber(&other, stacks, number * STACK);
    __sanitizer_finish_switch_fiber(other, nullptr, nullptr);
}

// Prepares the threads of a launch; reuses the threads of the previous launch if it had the same number.
void make_threads() {
    const std::size_t number = std::size_t(blockDim.x) * blockDim.y * blockDim.z;
    if (threads.size() != number) map_threads(number);
    for (std::size_t i = 0; i < number; ++i) {
        const unsigned n = i;
        threads[i].index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    }
}

template <typename T>
T read_value() {
    T value;
    if (std::fread(&value, sizeof value, 1, stdin) != 1) fail("standard input ends too early");
    return value;
}

// Returns the size of the margins around an array: the size of the array, limited to 4 KiB to 1 MiB, because a typical
// overrun is a row or tile.
std::size_t margin_of(std::size_t bytes) { return std::clamp<std::size_t>(bytes, 4 << 10, 1 << 20) / 256 * 256; }

void free_unused() {
    for (const auto& [bytes, same] : unused) {
        for (char* data : same) std::free(data - margin_of(bytes));
    }
    unused.clear();
}

Array read_array(const char* name, std::size_t bytes, bool late) {
    const std::size_t margin = margin_of(bytes);
    char* data;
    if (std::vector<char*>& same = unused[bytes]; !same.empty()) {
        data = same.back();
        same.pop_back();
    } else {
        data = static_cast<char*>(std::malloc(bytes + 2 * margin)) + margin;
        __asan_poison_memory_region(data - margin, margin);
        __asan_poison_memory_region(data + bytes, margin);
    }
    if (std::fread(data, 1, bytes, stdin) != bytes) fail("standard input ends too early");
    if (cuda_on_cpu::watch) cuda_on_cpu::watch(name, data, bytes, kernel->elements[arrays.size()]);
    return {name, data, bytes, margin, late};
}

// Reads an argument from standard input. It is one of: a size in bytes, the pointer's offset in the bytes, and the
// bytes; -1 and a slot (a number or a null pointer); -2, the index of an earlier argument, and an offset in its bytes.
// If the launch overlaps, LATE_ARRAYS lists the late arrays, with a comma before and after each name.
void read_argument(const char* name) {
    const auto size = read_value<std::int64_t>();
    const auto word = read_value<std::uint64_t>();
    if (size == -1) {
        arrays.push_back({name, nullptr, 0, 0, false});
        slots.push_back(word);
    } else if (size == -2) {
        arrays.push_back({name, nullptr, 0, 0, false});
        const auto offset = read_value<std::uint64_t>();
        slots.push_back(reinterpret_cast<std::uintptr_t>(arrays.at(word).data) + offset);
    } else {
        const char* late = std::getenv("LATE_ARRAYS");
        arrays.push_back(read_array(name, size, late && std::strstr(late, ("," + std::string(name) + ",").c_str())));
        slots.push_back(reinterpret_cast<std::uintptr_t>(arrays.back().data) + word);
    }
}

void launch(Order& order) {
    const std::vector<std::size_t> blocks = order.next(std::size_t(gridDim.x) * gridDim.y * gridDim.z);
    blocks_left = blocks.size();
    text_room = TEXT_ROOM;
    for (std::size_t b : blocks) {
        const unsigned n = b;
        blockIdx = {n % gridDim.x, n / gridDim.x % gridDim.y, n / gridDim.x / gridDim.y};
        --blocks_left;
        run_block(order, n);
    }
}

// Keeps `kept` bytes at each end of an array, and rotates the bytes between by 16.
void rotate(const Array& array, std::size_t kept) {
    if (array.bytes <= 2 * kept) return;
    char *first = array.data + kept, *last = array.data + array.bytes - kept;
    std::rotate(first, first + 16 % (last - first), last);
}

// Finds two neighboring elements that differ, after the first `part` sixths of an array. Exchanges them, or copies the
// second to the first, which changes the sum of the array, too.
void change_one(const Array& array, std::size_t element, int part, bool exchanges) {
    for (std::size_t i = array.bytes / element * part / 6; (i + 2) * element <= array.bytes; ++i) {
        char *first = array.data + i * element, *second = first + element;
        if (!std::memcmp(first, second, element)) continue;
        exchanges ? void(std::swap_ranges(first, second, second)) : void(std::memcpy(first, second, element));
        return;
    }
}

typedef std::vector<std::string> Contents;  // the bytes of all arrays

Contents contents() {
    Contents found;
    for (const Array& array : arrays) found.emplace_back(array.data ? array.data : "", array.data ? array.bytes : 0);
    return found;
}

void restore(const Contents& before) {
    for (std::size_t i = 0; i < arrays.size(); ++i) std::copy(before[i].begin(), before[i].end(), arrays[i].data);
}

constexpr int CHANGES = 12;

// Changes all arrays: one or two elements, or with the last two changes all bytes except 1024 or 64 bytes at each end.
void change_arrays(int change) {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        if (!arrays[i].data) continue;
        if (change < CHANGES - 2) {
            change_one(arrays[i], kernel->elements[i], 1 + change % 5, change >= 5);
        } else {
            rotate(arrays[i], change == CHANGES - 1 ? 64 : 1024);
        }
    }
}

// Launches the kernel before the launch that counts: `count` times on rotated arrays, and then if `varied` on arrays
// that differ little from the given ones. Variables of the file keep their values between launches, and these values
// must not change the result of the next launch. A kernel may reset only one of two counters, count its launches, or
// keep results and compare a few values.
void rehearse(Order& order, int count, bool varied) {
    const Contents before = contents();
    rehearses = true;
    for (const Array& array : arrays) rotate(array, 0);
    for (int i = 0; i < count; ++i) launch(order);
    for (int change = 0; varied && change < CHANGES; ++change) {
        restore(before);
        change_arrays(change);
        launch(order);
    }
    restore(before);
    std::fflush(stdout);
    rehearses = false;
}

// Launches the kernel after the launch that counts: each time on rotated arrays, on arrays that differ little from the
// given ones, and again on the given ones. Stops if a result differs from the first one.
void repeat(Order& order, const Contents& before) {
    const Contents first = contents();
    rehearses = true;
    for (int change = 0; change < CHANGES && contents() == first; ++change) {
        restore(before);
        for (const Array& array : arrays) rotate(array, 0);
        launch(order);
        restore(before);
        change_arrays(change);
        launch(order);
        restore(before);
        launch(order);
    }
    std::fflush(stdout);
    rehearses = false;
}

}  // namespace

void cuda_on_cpu::stop(const char* what, const char* file, int line) {
    std::fprintf(stderr, "cuda_on_cpu: %s\ncuda_on_cpu: at %s:%d\ncuda_on_cpu: in %s, block %s, thread %s\n", what, file,
                 line, kernel->name, at(blockIdx).c_str(), at(threadIdx).c_str());
    std::fflush(stdout);
    _exit(4);
}

void cuda_on_cpu::note(const char* what) {
    static bool said;
    if (!said) std::fprintf(stderr, "cuda_on_cpu: note: %s\n", what);
    said = true;
}

bool cuda_on_cpu::each_block_first(void (*first)()) {
    *std::find(firsts, firsts + 3, nullptr) = first;
    return true;
}

// Makes uninitialized variables of the kernel hold fill bytes. Programs that are optimised are compiled with
// -ftrivial-auto-var-init=pattern instead, which fills these variables with large negative numbers.
__attribute__((noipa, no_sanitize("address"))) void cuda_on_cpu::fill_stack() {
    if (!exact_places) return;
    char below[16 << 10];  // covers the future stack frame of the kernel
    std::memset(below, fill, sizeof below);
    asm volatile("" : : "r"(below) : "memory");
}

void cuda_on_cpu::barrier(const char* file, int line) {
    counted(false, file, line);
}

int cuda_on_cpu::counted(bool predicate, const char* file, int line) {
    wait_at(file, line, "waits for the block");
    current->value = predicate;
    stop_in(State::at_barrier);
    return count;
}

const cuda_on_cpu::Gathered& cuda_on_cpu::gather(unsigned mask, std::uint64_t value, const char* file, int line,
                                                 int delay, Sought sought) {
    Thread& self = *current;
    wait_at(file, line, "waits for the warp", mask, value, sought.type);
    self.sought = sought;
    self.state = State::at_exchange;
    self.mask = mask;
    self.value = value;
    self.delay = delay;
    if (!(mask >> lane() & 1)) fail(describe(self) + ": its mask does not name its own lane");
    stop_in(State::at_exchange);
    return *self.received;
}

unsigned cuda_on_cpu::active_lanes(const char* file, int line) {
    wait_at(file, line, "asks for the active lanes");
    current->sought = {};
    current->mask = 0;
    stop_in(State::at_exchange);
    return current->received->lanes;
}

void cuda_on_cpu::sleep() { make_way(); }

void cuda_on_cpu::named_barrier(int id, unsigned number, bool waits, const char* file, int line) {
    wait_at(file, line, waits ? "waits at a named barrier" : "arrives at a named barrier");
    Thread& self = *current;
    self.id = id, self.number = number, self.waits = waits;
    stop_in(State::at_named);
}

void cuda_on_cpu::poll(const char* file, int line) {
    wait_at(file, line, "tests an mbarrier");
    current->polls = true;
    stop_in(State::ready);
}

void cuda_on_cpu::begin_meeting(const void* meeting) {
    if (meeting_begins) meeting_begins(meeting);
}

void cuda_on_cpu::arrive_at(const void* meeting) {
    idle = 0;
    if (thread_arrives) thread_arrives(meeting, thread_number());
}

void cuda_on_cpu::learn_from(const void* meeting) {
    if (thread_learns) thread_learns(meeting, thread_number());
}

// Addresses of static shared memory are offsets from a multiple of 1024 before it; addresses of dynamic shared memory
// are larger by DYNAMIC. An address of either may be out of bounds: the access is reported, not its computation.
constexpr std::ptrdiff_t DYNAMIC = 1 << 20;

static char* aligned(void* place) { return reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(place) & -1024); }

unsigned cuda_on_cpu::to_shared(const void* place) {
    const char* address = static_cast<const char*>(place);
    if (address >= shared_begin && address < shared_end) return address - aligned(shared_begin);
    const std::ptrdiff_t offset = address - aligned(dynamic);
    if (offset <= -DYNAMIC / 2 || offset >= DYNAMIC / 2) {
        fail(std::string("in ") + kernel->name + ", thread " + at(threadIdx) + ": an address that is not in shared "
             "memory is converted to one of shared memory");
    }
    return offset + DYNAMIC;
}

void* cuda_on_cpu::from_shared(std::uint64_t address) {
    const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(address);
    return offset < DYNAMIC / 2 ? aligned(shared_begin) + offset : aligned(dynamic) + (offset - DYNAMIC);
}

void cuda_on_cpu::atomic(const void* place, std::size_t bytes) {
    if (steps + 64 > turn) make_way();  // now, so that no switch occurs between the read and the write of the access
    if (atomic_access) atomic_access(place, bytes, __builtin_return_address(0));
}

void cuda_on_cpu::atomic_read(const void* place, std::size_t bytes) {
    if (steps + 64 > turn) make_way();
    if (atomic_load) atomic_load(place, bytes, __builtin_return_address(0));
}

// Lets the other threads run between a plain read and the atomicCAS that compares its value. They may change the value,
// so that a kernel that does not retry gives a wrong result.
void cuda_on_cpu::comparison(const void* place, std::size_t bytes, std::uint64_t expected) {
    if (read_is_compared && read_is_compared(place, bytes, expected)) make_way();
    if (steps + 64 > turn) make_way();
    if (atomic_access) atomic_access(place, bytes, __builtin_return_address(0));
}

void cuda_on_cpu::read_only(const void* place, std::size_t bytes) {
    if (read_only_access) read_only_access(place, bytes, __builtin_return_address(0));
}

int cuda_on_cpu::fill_byte() { return fill; }

void cuda_on_cpu::fence(bool of_device) {
    if (fence_passed) fence_passed(of_device);
}

// g++ guards the initialization of shared arrays of classes with constructors, such as __half, although there is none.
// libstdc++'s guard would wait for the fiber that has begun the initialization, and that fiber would never run again.
extern "C" int __cxa_guard_acquire(char* guard) { return *guard == 0; }
extern "C" void __cxa_guard_release(char* guard) { *guard = 1; }

// Called at the start of each basic block of a kernel that may wait in a loop.
extern "C" void __sanitizer_cov_trace_pc() {
    if (++steps < turn || !current || cuda_on_cpu::uninterrupted) return;
    turn = 1'000;
    spins = true;
    make_way();
}

int cuda_on_cpu::thread_number() { return current ? current - threads.data() : -1; }

int cuda_on_cpu::stack_owner(const void* address) {
    const char* place = static_cast<const char*>(address);
    return place >= stacks && place < stacks + threads.size() * STACK ? (place - stacks) / STACK : -1;
}

const char* cuda_on_cpu::kernel_name() { return kernel->name; }

double cuda_on_cpu::bessel_i(double order, double x) { return std::cyl_bessel_i(order, x); }

long long cuda_on_cpu::clock_cycles() {
    static unsigned calls;
    static long long last;  // several calls see one value of clock()
    last = std::max(last, clock() * 1024LL) + 1 + (++calls * 389 & 1023);
    return last;
}

int cuda_on_cpu::lane() { return (current - threads.data()) % WARP; }

// All blocks use the same memory. An initializer of a namespace-scope variable calls this function before main.
void* cuda_on_cpu::dynamic_shared(const char* name, std::size_t element) {
    if (!dynamic) {
        const char* bytes = std::getenv("DYNAMIC_BYTES");
        dynamic_bytes = bytes ? std::strtoul(bytes, nullptr, 10) : 0;
        dynamic = std::malloc(dynamic_bytes);
    }
    if (name && name_dynamic) name_dynamic(name, element);
    return dynamic;
}

// Returns whether the launch requested immediate copies; see mma_ptx.h.
bool cuda_on_cpu::copies_at_once() {
    static const bool asked_for = std::getenv("COPIES_AT_ONCE") != nullptr;
    return asked_for;
}

void cuda_on_cpu::wait_for_previous() {
    waited = true;
    show_late_arrays(true);
}

// Runs a launch. words: kernel name, grid x y z, block x y z, order, seed, names of the arguments.
static void run(const std::vector<std::string>& words, std::FILE* results) {
    if (words.size() < 9) fail("expected at least 9 words");
    auto number = [&](int i) { return static_cast<unsigned>(std::strtoul(words[i].c_str(), nullptr, 10)); };
    for (kernel = cuda_on_cpu::entries; kernel->name && words[0] != kernel->name; ++kernel) {}
    if (!kernel->name) fail("no kernel " + words[0]);
    gridDim = {number(1), number(2), number(3)};
    blockDim = {number(4), number(5), number(6)};
    const std::string& kind = words[7];
    Order order = {kind == "reverse", kind == "shuffled", std::strtoull(words[8].c_str(), nullptr, 10), {}};
    for (std::size_t i = 9; i < words.size(); ++i) read_argument(words[i].c_str());
    turn = order.shuffled ? SHORT_TURN : LONG_TURN;
    const char* limit = std::getenv("TIME_LIMIT");
    set_alarm(limit ? std::strtod(limit, nullptr) : 0);
    make_threads();
    const char *rehearsals = std::getenv("REHEARSAL"), *variations = std::getenv("VARIED");
    const std::string varied = variations ? variations : "";
    if (rehearsals) rehearse(order, std::atoi(rehearsals), varied == "before");
    const Contents before = varied == "after" ? contents() : Contents();
    launch(order);
    if (varied == "after") repeat(order, before);
    show_late_arrays(true);
    set_alarm(0);
    std::fflush(stdout);
    for (const Array& array : arrays) {
        if (!array.data) continue;
        std::fwrite(array.data, 1, array.bytes, results);
        unused[array.bytes].push_back(array.data);
    }
    if (std::fflush(results) != 0) _exit(5);
    arrays.clear();
    slots.clear();
    if (unused.size() > MOST_SIZES) free_unused();
}

static bool read_all(void* data, std::size_t bytes) {
    for (ssize_t n; bytes; bytes -= n, data = static_cast<char*>(data) + n) {
        if ((n = read(STDIN_FILENO, data, bytes)) <= 0) return false;
    }
    return true;
}

// Runs a launch in a forked process, so that the program's variables have the values from the program's start.
static void run_apart(const std::vector<std::string>& words, std::FILE* results) {
    const pid_t child = fork();
    if (child < 0) fail("no process for a launch");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run(words, results);
        std::exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) < 0) fail("the process of a launch is lost");
    if (WIFSIGNALED(status)) {
        std::signal(WTERMSIG(status), SIG_DFL);
        std::raise(WTERMSIG(status));
    }
    if (status) _exit(WEXITSTATUS(status));
}

// Reads launches from standard input, a socket: for each launch the number of bytes of its words, the words, each with
// a zero after it, and the arguments. After a successful launch it writes a byte to the socket.
static void wait_for_launches(std::FILE* results) {
    const bool keeps = std::getenv("VARIABLES") || cuda_on_cpu::watch;  // a launch may leave values in variables
    std::signal(SIGINT, SIG_IGN);  // Ctrl-C is for the process that waits for a launch
    std::int64_t bytes;
    while (read_all(&bytes, sizeof bytes)) {
        std::string text(bytes, '\0');
        if (!read_all(&text[0], bytes)) return;
        std::vector<std::string> words;
        for (std::size_t at = 0; at < text.size(); at += words.back().size() + 1) words.push_back(&text[at]);
        (keeps ? run_apart : run)(words, results);
        if (write(STDIN_FILENO, "", 1) != 1) return;
    }
}

int main(int argc, char** argv) {
    cuda_on_cpu::dynamic_shared(nullptr, 0);
    overlaps = std::getenv("LATE_ARRAYS") != nullptr;
    exact_places = std::getenv("EXACT_PLACES") != nullptr;
    if (const char* byte = std::getenv("FILL")) fill = std::atoi(byte);
    std::FILE* results = fdopen(STDOUT_FILENO, "wb");
    stdout = fopencookie(nullptr, "w", {nullptr, write_text, nullptr, nullptr});
    setvbuf(stdout, nullptr, _IOLBF, 0);  // complete lines are written even if the program ends in an error
    std::signal(SIGABRT, on_abort);
    std::signal(SIGPROF, on_alarm);
    if (argc > 1) {
        run({argv + 1, argv + argc}, results);
    } else {
        wait_for_launches(results);
    }
}
