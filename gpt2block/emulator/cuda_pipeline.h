// Asynchronous copies to shared memory. A copy happens as late as its semantics allow, when the kernel waits for it;
// until then its destination holds bytes of 0xFF. The loader puts this file into an unnamed namespace, or includes it
// before through ptx.h. Functions that access memory are always inlined, so that a report names the line of the kernel.
#pragma once

namespace cuda_on_cpu_pipeline {

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, zeros, group;
};

// A ring of copies per thread. Functions that access only these variables are not checked for races.
constexpr unsigned MOST = 512;  // maximum number of copies in flight per thread
static Copy copies[1024][MOST];
static unsigned firsts[1024], ends[1024], groups[1024];
static const bool forgotten = cuda_on_cpu::each_block_first([] {  // drop copies that the previous block did not await
    for (int thread = 0; thread < 1024; ++thread) firsts[thread] = ends[thread] = groups[thread] = 0;
});

inline unsigned thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

#define UNRECORDED __attribute__((noinline, no_sanitize("thread")))
UNRECORDED inline bool put(Copy copy) {
    const unsigned t = thread();
    if (ends[t] - firsts[t] == MOST) return false;
    copy.group = groups[t];
    copies[t][ends[t]++ % MOST] = copy;
    return true;
}

// Takes the oldest copy of the thread, if it belongs to a group before the last `later` groups.
UNRECORDED inline bool take(std::size_t later, Copy& copy) {
    const unsigned t = thread();
    if (firsts[t] == ends[t]) return false;
    copy = copies[t][firsts[t] % MOST];
    if (copy.group + later >= groups[t]) return false;
    ++firsts[t];
    return true;
}

UNRECORDED inline void end_group() { ++groups[thread()]; }
#undef UNRECORDED

__forceinline__ void arrive(const Copy& copy) {
    if (copy.bytes == 16 && copy.zeros == 0) {
        *reinterpret_cast<uint4*>(copy.to) = *reinterpret_cast<const uint4*>(copy.from);
    } else if (copy.bytes == 4 && copy.zeros == 0) {
        *reinterpret_cast<unsigned*>(copy.to) = *reinterpret_cast<const unsigned*>(copy.from);
    } else {
        for (unsigned i = 0; i < copy.bytes; ++i) copy.to[i] = i < copy.bytes - copy.zeros ? copy.from[i] : 0;
    }
}

}  // namespace cuda_on_cpu_pipeline

__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0,
                                             const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    using namespace cuda_on_cpu_pipeline;
    if ((bytes != 4 && bytes != 8 && bytes != 16) || zeros > bytes) {
        cuda_on_cpu::stop("an asynchronous copy has 4, 8 or 16 bytes", file, line);
    }
    if ((std::uintptr_t)to % bytes || (std::uintptr_t)from % bytes) {
        cuda_on_cpu::stop("an address of an asynchronous copy is not a multiple of its bytes", file, line);
    }
    const Copy copy = {static_cast<char*>(to), static_cast<const char*>(from), (unsigned)bytes, (unsigned)zeros, 0};
    if (cuda_on_cpu::copies_at_once()) return arrive(copy);
    for (unsigned i = 0; i < bytes; ++i) {
        // Reads the source, so that a report about it names this line.
        if (i < bytes - zeros) [[maybe_unused]] volatile char unused = copy.from[i];
        copy.to[i] = (char)0xFF;
    }
    if (!put(copy)) cuda_on_cpu::stop("the emulator has at most 512 asynchronous copies in flight", file, line);
}

inline void __pipeline_commit() { cuda_on_cpu_pipeline::end_group(); }

__forceinline__ void __pipeline_wait_prior(std::size_t later) {
    for (cuda_on_cpu_pipeline::Copy copy; cuda_on_cpu_pipeline::take(later, copy);) cuda_on_cpu_pipeline::arrive(copy);
}
