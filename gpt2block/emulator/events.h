// What cuda_on_cpu.cpp tells races.cpp, where a program is linked with it; otherwise the functions are null.
#pragma once
#include <cstddef>

namespace cuda_on_cpu {

int thread_number();  // in its block, of the thread that runs; -1 while none does
const char* kernel_name();

__attribute__((weak)) void watch(const char* name, const void* data, std::size_t bytes);
__attribute__((weak)) void block_begins(unsigned number, std::size_t threads, const void* dynamic, std::size_t bytes);
__attribute__((weak)) void barrier_opens();
__attribute__((weak)) void lanes_meet(std::size_t first, unsigned lanes);  // a warp's first thread, and a mask

}  // namespace cuda_on_cpu
