// Events that cuda_on_cpu.cpp reports to races.cpp. In a program without races.cpp the weak functions are null.
#pragma once
#include <cstddef>
#include <cstdint>

// Bounds of all shared variables: the linker joins sections of the same name in the order of the files, and the files
// with shared_begin and shared_end are the first and the last.
extern char shared_begin[], shared_end[];

namespace cuda_on_cpu {

int thread_number();  // number of the running thread in its block; -1 while no thread runs
int stack_owner(const void* address);  // number of the thread whose stack contains the address; -1: none
const char* kernel_name();

__attribute__((weak)) void watch(const char* name, const void* data, std::size_t bytes, std::size_t element);
__attribute__((weak)) void name_dynamic(const char* name, std::size_t element);
__attribute__((weak)) void block_begins(unsigned number, std::size_t threads, const void* dynamic, std::size_t bytes);
__attribute__((weak)) void thread_ends();
// The running thread waits at a barrier or an exchange. kind: event in words. type: of the value, see type_letter.
__attribute__((weak)) void thread_waits(const char* file, int line, const char* kind, unsigned mask,
                                        std::uint64_t value, char type);
// A thread receives the value of lane `source` in an exchange. takes_part: whether this lane takes part.
__attribute__((weak)) void value_comes(std::size_t thread, int source, bool takes_part, std::uint64_t value, char type);
__attribute__((weak)) void barrier_diverges(std::size_t a, std::size_t b);  // numbers of the two threads
__attribute__((weak)) void barrier_opens();
__attribute__((weak)) void lanes_meet(std::size_t first, unsigned lanes);  // first: number of a warp's first thread
__attribute__((weak)) void atomic_access(const void* address, std::size_t bytes, void* place);
__attribute__((weak)) void atomic_load(const void* address, std::size_t bytes, void* place);
// Called before an atomicCAS. Returns whether it expects the value of a plain read by its thread, so that the other
// threads should run first.
__attribute__((weak)) bool read_is_compared(const void* address, std::size_t bytes, std::uint64_t expected);
__attribute__((weak)) void read_only_access(const void* address, std::size_t bytes, void* place);
__attribute__((weak)) void fence_passed(bool of_device);  // of_device: __threadfence(), else __threadfence_block()
// A thread arrives at a meeting, such as a named barrier, or learns of the accesses of all threads that have arrived.
__attribute__((weak)) void meeting_begins(const void* meeting);
__attribute__((weak)) void thread_arrives(const void* meeting, int thread);
__attribute__((weak)) void thread_learns(const void* meeting, int thread);

}  // namespace cuda_on_cpu
