// Asynchronous copies to shared memory. A copy happens as late as its semantics allow, when the kernel waits for it;
// until then its destination holds bytes of 0xFF. The loader puts this file into an unnamed namespace, or includes it
// before through ptx.h.
#pragma once

namespace cuda_on_cpu_pipeline {

struct Copy {
    char* to;
    const char* from;
    std::size_t bytes, zeros;  // the last `zeros` bytes of the destination become 0
    std::size_t chunk, first, step;  // the thread copies the chunks first, first + step, ...
    unsigned group;  // number of the commit that completes the group of the copy
    const void* barrier;  // null, or the barrier whose phase the copy belongs to
    unsigned phase;
};

constexpr unsigned MOST = 512;  // maximum number of copies in flight per thread
static Copy copies[1024][MOST];
static unsigned counts[1024], groups[1024];
static unsigned bound;  // number of copies in flight that belong to barriers
static const bool forgotten = cuda_on_cpu::each_block_first([] {  // drop copies that the previous block did not await
    for (int thread = 0; thread < 1024; ++thread) counts[thread] = groups[thread] = 0;
    bound = 0;
});

inline unsigned thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

// Calls do_byte(i) for each byte that the thread of a copy copies.
template <typename DoByte>
__forceinline__ void each_byte(const Copy& copy, DoByte do_byte) {
    for (std::size_t start = copy.first * copy.chunk; start < copy.bytes; start += copy.step * copy.chunk) {
        for (std::size_t i = start; i < start + copy.chunk && i < copy.bytes; ++i) do_byte(i);
    }
}

__attribute__((noinline, no_sanitize("thread"))) inline void record(Copy copy) {
    const unsigned t = thread();
    if (counts[t] == MOST) {
        cuda_on_cpu::stop("the emulator has at most 512 asynchronous copies in flight", __FILE__, __LINE__);
    }
    copy.group = groups[t];
    copies[t][counts[t]++] = copy;
    bound += copy.barrier != nullptr;
}

__forceinline__ void finish(const Copy& copy) {
    each_byte(copy, [&](std::size_t i) __attribute__((always_inline)) {
        copy.to[i] = i < copy.bytes - copy.zeros ? copy.from[i] : 0;
    });
}

__forceinline__ void begin(const Copy& copy) {
    if (cuda_on_cpu::copies_at_once()) return finish(copy);
    record(copy);
    each_byte(copy, [&](std::size_t i) __attribute__((always_inline)) {
        // Reads the source, so that a report about it names this line.
        if (i < copy.bytes - copy.zeros) [[maybe_unused]] volatile char unused = copy.from[i];
        copy.to[i] = (char)0xFF;
    });
}

inline void note_uncommitted() {
    cuda_on_cpu::note("a thread waits for an asynchronous copy that neither __pipeline_commit() nor "
                      "cp.async.commit_group has committed");
}

// Finishes the copies that belong to phases of a barrier before `phase`, of all threads.
__attribute__((noinline, no_sanitize("thread"))) inline void finish_bound(const void* barrier, unsigned phase) {
    const cuda_on_cpu::Uninterrupted whole;
    for (unsigned t = 0; bound && t < blockDim.x * blockDim.y * blockDim.z; ++t) {
        unsigned kept = 0;
        for (unsigned c = 0; c < counts[t]; ++c) {
            const Copy& copy = copies[t][c];
            if (copy.barrier == barrier && (int)(phase - copy.phase) > 0) {
                --bound;
                finish(copy);
            } else {
                copies[t][kept++] = copy;
            }
        }
        counts[t] = kept;
    }
}

// Returns the largest size of a unit, at most 16, with which a copy can begin.
inline std::size_t unit(const void* to, const void* from, std::size_t bytes) {
    const std::size_t low = (std::uintptr_t)to | (std::uintptr_t)from | bytes | 16;
    return low & -low;
}

// Begins copies by all threads of a group, each of its share of the bytes.
template <typename Group>
__forceinline__ void begin_shared(const Group& group, void* to, const void* from, std::size_t bytes,
                                  const void* barrier = nullptr, unsigned phase = 0) {
    const std::size_t chunk = unit(to, from, bytes);
    const std::size_t rank = group.thread_rank(), size = group.size();
    if (rank * chunk >= bytes) return;
    begin({static_cast<char*>(to), static_cast<const char*>(from), bytes, 0, chunk, rank, size, 0, barrier, phase});
}

struct ThisThread {
    static unsigned thread_rank() { return 0; }
    static unsigned size() { return 1; }
};

}  // namespace cuda_on_cpu_pipeline
