// Asynchronous copies by single threads: the primitives of CUDA's pipelines. See async_copies.h.
#pragma once
#include <async_copies.h>

__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0,
                                             const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if ((bytes != 4 && bytes != 8 && bytes != 16) || zeros > bytes) {
        cuda_on_cpu::stop("an asynchronous copy has 4, 8 or 16 bytes", file, line);
    }
    if ((std::uintptr_t)to % bytes || (std::uintptr_t)from % bytes) {
        cuda_on_cpu::stop("an address of an asynchronous copy is not a multiple of its bytes", file, line);
    }
    cuda_on_cpu_pipeline::begin(
        {static_cast<char*>(to), static_cast<const char*>(from), bytes, zeros, bytes, 0, 1, 0, nullptr, 0});
}

inline void __pipeline_commit() { ++cuda_on_cpu_pipeline::groups[cuda_on_cpu_pipeline::thread()]; }

__forceinline__ void __pipeline_wait_prior(std::size_t later) {
    using namespace cuda_on_cpu_pipeline;
    const unsigned t = thread();
    unsigned kept = 0;
    for (unsigned c = 0; c < counts[t]; ++c) {
        const Copy& copy = copies[t][c];
        if (!copy.barrier && copy.group == groups[t]) note_uncommitted();
        if (!copy.barrier && copy.group + later < groups[t]) {
            finish(copy);
        } else {
            copies[t][kept++] = copy;
        }
    }
    counts[t] = kept;
}
