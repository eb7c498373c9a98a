// Empty versions of AddressSanitizer's functions that cuda_on_cpu.cpp calls, for programs without AddressSanitizer.
#include <cstddef>

extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
void __sanitizer_print_stack_trace() {}
void __asan_poison_memory_region(const volatile void*, std::size_t) {}
void __asan_unpoison_memory_region(const volatile void*, std::size_t) {}
int __asan_report_present() { return 0; }
int __asan_get_report_access_type() { return 0; }
void* __asan_get_report_address() { return nullptr; }
}
