// Finds data races: two accesses to one byte by different threads, at least one of them a write, with no barrier that
// orders them. Linked into programs that are compiled with -fsanitize=thread instead of AddressSanitizer, whose calls
// of __tsan_read and __tsan_write arrive here; libtsan itself, which watches threads of the system, is not linked.
//
// What orders accesses: __syncthreads() within a block, and within a warp every exchange (__syncwarp(), shuffles) among
// the lanes of its mask, followed by vector clocks. Nothing orders two blocks. A kernel that uses atomics may order its
// blocks by them, so that accesses of different blocks are then not compared. Atomic accesses are not recorded.
#include "cuda_on_cpu.h"
#include "events.h"

#include <cstddef>
#include <cstdio>
#include <string>
#include <unistd.h>
#include <vector>

extern "C" {
extern char __start_cuda_shared[] __attribute__((weak));
extern char __stop_cuda_shared[] __attribute__((weak));
}

namespace {

constexpr int WARP = 32;

struct Access {
    int thread = -1;  // of its block; -1: none so far
    unsigned block, phase, clock;
    void* place;  // in the program
};

struct Byte {
    Access written, read[2];  // the last write, and the last reads of two different threads
};

struct Region {
    std::string name;
    const char* data;
    std::size_t bytes;
    bool shared;
    std::vector<Byte> history;
};

struct Clock {
    unsigned of[WARP];  // lane of the warp -> its last access that is known to be complete
};

std::vector<Region> regions;
std::vector<Clock> clocks;  // of the threads of the block
unsigned block, phase;
bool atomics;

std::string at(int thread) {
    const unsigned n = thread, x = n % blockDim.x, y = n / blockDim.x % blockDim.y, z = n / blockDim.x / blockDim.y;
    return "thread (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

bool ordered(const Access& before, int thread, const Region& region) {
    if (before.thread < 0) return true;
    if (before.block != block) return region.shared || atomics;
    if (before.thread == thread || before.phase < phase) return true;
    if (before.thread / WARP != thread / WARP) return false;
    return clocks[thread].of[before.thread % WARP] >= before.clock;
}

// The loader replaces an address in braces by its line in the source.
[[noreturn]] void report(const Region& region, std::size_t byte, const Access& before, const char* was, const char* is,
                         int thread, void* place) {
    char lines[2][32];
    std::snprintf(lines[0], sizeof lines[0], "{%p}", place);
    std::snprintf(lines[1], sizeof lines[1], "{%p}", before.place);
    const bool same = before.block == block;
    std::fprintf(stderr, "cuda_on_cpu: race in %s: %s %s byte %zu of %s at %s; %s%s %s it at %s, and %s\n",
                 cuda_on_cpu::kernel_name(), at(thread).c_str(), is, byte, region.name.c_str(), lines[0],
                 at(before.thread).c_str(), same ? "" : " of another block", was, lines[1],
                 same ? "no barrier is between them" : "nothing orders two blocks");
    _exit(3);
}

void record(const void* address, std::size_t bytes, bool write, void* place) {
    const int thread = cuda_on_cpu::thread_number();
    if (thread < 0) return;
    const char* first = static_cast<const char*>(address);
    for (Region& region : regions) {
        if (first < region.data || first >= region.data + region.bytes) continue;
        if (region.history.empty()) region.history.resize(region.bytes);
        const Access now = {thread, block, phase, clocks[thread].of[thread % WARP], place};
        const std::size_t start = first - region.data, end = start + bytes;
        for (std::size_t i = start; i < end && i < region.bytes; ++i) {
            Byte& byte = region.history[i];
            const char* is = write ? "writes" : "reads";
            if (!ordered(byte.written, thread, region)) report(region, i, byte.written, "wrote", is, thread, place);
            for (const Access& read : byte.read) {
                if (write && !ordered(read, thread, region)) report(region, i, read, "read", is, thread, place);
            }
            if (write) {
                byte.written = now;
            } else {
                if (byte.read[0].thread != thread) byte.read[1] = byte.read[0];
                byte.read[0] = now;
            }
        }
        return;
    }
}

}  // namespace

void cuda_on_cpu::watch(const char* name, const void* data, std::size_t bytes) {
    regions.push_back({name, static_cast<const char*>(data), bytes, false, {}});
}

void cuda_on_cpu::block_begins(unsigned number, std::size_t threads, const void* dynamic, std::size_t bytes) {
    while (!regions.empty() && regions.back().shared) regions.pop_back();
    const std::size_t fixed = __stop_cuda_shared - __start_cuda_shared;
    if (fixed) regions.push_back({"the shared variables", __start_cuda_shared, fixed, true, {}});
    if (bytes) regions.push_back({"the dynamic shared memory", static_cast<const char*>(dynamic), bytes, true, {}});
    clocks.assign(threads, {});
    for (std::size_t i = 0; i < threads; ++i) clocks[i].of[i % WARP] = 1;
    block = number;
    phase = 0;
}

void cuda_on_cpu::barrier_opens() { ++phase; }

void cuda_on_cpu::lanes_meet(std::size_t first, unsigned lanes) {
    Clock joined = {};
    for (int i = 0; i < WARP; ++i) {
        for (int k = 0; lanes >> i & 1 && k < WARP; ++k) {
            joined.of[k] = joined.of[k] < clocks[first + i].of[k] ? clocks[first + i].of[k] : joined.of[k];
        }
    }
    for (int i = 0; i < WARP; ++i) {
        if (!(lanes >> i & 1)) continue;
        clocks[first + i] = joined;
        ++clocks[first + i].of[i];
    }
}

void cuda_on_cpu::atomic_begins() { atomics = true; }

// Called by the code of the kernels.
#define ACCESSES(n)                                                                                                   \
    void __tsan_read##n(void* p) { record(p, n, false, __builtin_return_address(0)); }                                \
    void __tsan_write##n(void* p) { record(p, n, true, __builtin_return_address(0)); }                                \
    void __tsan_unaligned_read##n(void* p) { record(p, n, false, __builtin_return_address(0)); }                      \
    void __tsan_unaligned_write##n(void* p) { record(p, n, true, __builtin_return_address(0)); }

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, std::size_t n) { record(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, std::size_t n) { record(p, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// AddressSanitizer's functions, which cuda_on_cpu.cpp calls.
void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
void __sanitizer_print_stack_trace() {}
void __asan_poison_memory_region(const volatile void*, std::size_t) {}
void __asan_unpoison_memory_region(const volatile void*, std::size_t) {}
int __asan_report_present() { return 0; }
int __asan_get_report_access_type() { return 0; }
void* __asan_get_report_address() { return nullptr; }
}
