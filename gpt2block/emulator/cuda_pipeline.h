// Asynchronous copies to shared memory. A copy happens as late as its semantics allow, when the kernel waits for it;
// until then its destination holds bytes of 0xFF. The loader puts this file into an unnamed namespace.
#pragma once

namespace cuda_on_cpu_pipeline {

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, zeros, group;
};

constexpr int MOST = 256;  // maximum number of copies in flight per thread
static Copy copies[1024][MOST];
static unsigned counts[1024], groups[1024];
static const bool forgotten = cuda_on_cpu::each_block_first([] {  // drop copies that the previous block did not await
    for (int thread = 0; thread < 1024; ++thread) counts[thread] = groups[thread] = 0;
});

inline unsigned thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

}  // namespace cuda_on_cpu_pipeline

inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0) {
    using namespace cuda_on_cpu_pipeline;
    const unsigned t = thread();
    assert((bytes == 4 || bytes == 8 || bytes == 16) && zeros <= bytes);
    assert((std::uintptr_t)to % bytes == 0 && (std::uintptr_t)from % bytes == 0);
    assert(counts[t] < MOST);
    char* bytes_to = static_cast<char*>(to);
    copies[t][counts[t]++] = {bytes_to, static_cast<const char*>(from), (unsigned)bytes, (unsigned)zeros, groups[t]};
    for (unsigned i = 0; i < bytes; ++i) bytes_to[i] = (char)0xFF;
}

inline void __pipeline_commit() { ++cuda_on_cpu_pipeline::groups[cuda_on_cpu_pipeline::thread()]; }

inline void __pipeline_wait_prior(std::size_t later) {
    using namespace cuda_on_cpu_pipeline;
    const unsigned t = thread();
    unsigned kept = 0;
    for (unsigned c = 0; c < counts[t]; ++c) {
        const Copy& copy = copies[t][c];
        if (copy.group + later < groups[t]) {
            for (unsigned i = 0; i < copy.bytes; ++i) copy.to[i] = i < copy.bytes - copy.zeros ? copy.from[i] : 0;
        } else {
            copies[t][kept++] = copy;
        }
    }
    counts[t] = kept;
}
