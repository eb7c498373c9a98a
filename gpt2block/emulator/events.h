// What cuda_on_cpu.cpp tells races.cpp, where a program is linked with it; otherwise the functions are null.
#pragma once
#include <cstddef>
#include <cstdint>

// The shared variables of the kernels' translation unit are between these two: sections of one name are linked in the
// order of their files, and the first and the last one have nothing else there.
extern char shared_begin[], shared_end[];

namespace cuda_on_cpu {

int thread_number();  // in its block, of the thread that runs; -1 while none does
int stack_owner(const void* address);  // the thread whose local memory has it; -1: none
const char* kernel_name();

__attribute__((weak)) void watch(const char* name, const void* data, std::size_t bytes, std::size_t element);
__attribute__((weak)) void name_dynamic(const char* name, std::size_t element);
__attribute__((weak)) void block_begins(unsigned number, std::size_t threads, const void* dynamic, std::size_t bytes);
__attribute__((weak)) void thread_ends();
__attribute__((weak)) void barrier_opens();
__attribute__((weak)) void lanes_meet(std::size_t first, unsigned lanes);  // a warp's first thread, and a mask
__attribute__((weak)) void atomic_access(const void* address, std::size_t bytes, void* place);
// Before an atomicCAS: whether it expects what its thread has plainly read there, and the others should run first.
__attribute__((weak)) bool read_is_compared(const void* address, std::size_t bytes, std::uint64_t expected);
__attribute__((weak)) void fence_passed(bool of_device);  // or of a block alone

}  // namespace cuda_on_cpu
