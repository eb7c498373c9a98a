// The part of CUDA C++ that kernels use, implemented for g++, so that the shipped sources run on the CPU under
// AddressSanitizer. The threads of a block are fibers; see cuda_on_cpu.cpp.
#pragma once
#include <cfenv>
#include <cfloat>
#include <climits>
#include <cstdint>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // leaves out Bessel functions, which quadruple the compile time of <cmath>
#include <bits/stl_algobase.h>      // std::min and std::max, without the rest of <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>  // clock()
#include <limits>
#include <math.h>    // overloads of <cmath> and <cstdlib> in the global namespace, as in CUDA
#include <stdlib.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__  // empty: the loader puts kernel files into an unnamed namespace
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // empty, so that __attribute__((__noinline__)) of system headers remains valid
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Shared variables are in the section .noinit, so that the runtime can fill all of them before each block. (On static
// variables of templates, g++ ignores an attribute that names another section.) The loader replaces
// `extern __shared__` by dynamic_shared().
#define __shared__ static __attribute__((noinit))

#include "vectors.h"

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// The runtime sets these variables whenever it resumes a thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_cpu {

template <typename To, typename From>
__forceinline__ To bits(const From& from) {  // copies the low bytes, with zeros above
    To to;
    if constexpr (sizeof(From) < sizeof(To)) std::memset(&to, 0, sizeof to);
    std::memcpy(&to, &from, sizeof to < sizeof from ? sizeof to : sizeof from);
    return to;
}

struct Gathered {  // the values that lanes of a warp have exchanged
    std::uint64_t values[32];  // by lane; a lane that did not take part has the fill bytes of unwritten memory
    unsigned lanes;
};

struct Sought {  // what a lane receives in an exchange, for a trace
    int lane = -1;    // lane whose value it receives; -1: it receives values of several lanes
    char type = '?';  // type of the values, as in type_letter
};

template <typename T>
constexpr char type_letter() {  // letter of the type in Python's module struct; ?: another type
    if (sizeof(T) < 4) return '?';
    if (std::is_floating_point_v<T>) return sizeof(T) == 8 ? 'd' : 'f';
    const char* letters = std::is_signed_v<T> ? "iq" : "IQ";
    return std::is_integral_v<T> ? letters[sizeof(T) == 8] : '?';
}

// These functions are in another translation unit, so that the compiler must assume that they change any memory.
void barrier(const char* file, int line);
// Exchanges a value with the lanes of `mask`. delay: number of turns of the other threads before the exchange. The
// result is valid until the lane's next exchange.
const Gathered& gather(unsigned mask, std::uint64_t value, const char* file, int line, int delay = 0, Sought = {});
unsigned active_lanes(const char* file, int line);
int lane();
double bessel_i(double order, double x);  // calls std::cyl_bessel_i
long long clock_cycles();  // it never goes back; every value of the low 10 bits is as frequent
void* dynamic_shared(const char* name, std::size_t element);
bool copies_at_once();  // whether asynchronous copies arrive immediately
void wait_for_previous();  // see lib/overlap.cuh
bool each_block_first(void (*first)());  // registers a function to call before every block; returns true
void sleep();  // lets the other threads run
extern int uninterrupted;  // number of existing Uninterrupted objects
struct Uninterrupted {     // while it exists, no other thread runs; a function that waits may not be called
    Uninterrupted() { ++uninterrupted; }
    ~Uninterrupted() { --uninterrupted; }
};
void atomic(const void* place, std::size_t bytes);  // must be called before an atomic access
void atomic_read(const void* place, std::size_t bytes);  // must be called before an atomic load
void comparison(const void* place, std::size_t bytes, std::uint64_t expected);  // must be called before an atomicCAS
void read_only(const void* place, std::size_t bytes);  // must be called before a load by the read-only cache
void fence(bool of_device);
int fill_byte();  // byte that fills shared memory before the first write
// Waits at a barrier of PTX with the number `id` until `number` threads have arrived, or only arrives.
void named_barrier(int id, unsigned number, bool waits, const char* file, int line);
void poll(const char* file, int line);  // lets the other threads run, because the thread waits for an mbarrier
// Accesses before arrive_at() precede accesses after learn_from() if the address `meeting` is the same.
void begin_meeting(const void* meeting);
void arrive_at(const void* meeting);
void learn_from(const void* meeting);
// The address of shared memory in PTX's state space .shared, and its inverse.
unsigned to_shared(const void* place);
void* from_shared(std::uint64_t address);

// A kernel as the runtime finds and calls it: a name, and a function with an 8-byte slot for every argument.
struct Entry {
    const char* name;
    void (*call)(const std::uint64_t* slots);
    const std::size_t* elements;  // bytes of each argument's element type; 1 for numbers
};

// Fills the stack below, so that uninitialized variables of the next called function hold fill bytes. Only for programs
// that are not optimised.
void fill_stack();

template <auto KERNEL>
struct Call;

template <typename T>
constexpr std::size_t size_of_element() {
    if constexpr (std::is_pointer_v<T> && !std::is_void_v<std::remove_pointer_t<T>>) {
        return sizeof(std::remove_pointer_t<T>);
    } else {
        return 1;
    }
}

template <typename... P, void (*KERNEL)(P...)>
struct Call<KERNEL> {
    static constexpr std::size_t elements[] = {size_of_element<P>()..., 1};

    static void call(const std::uint64_t* slots) { spread(slots, std::index_sequence_for<P...>{}); }

    // No other function may be called between fill_stack and the kernel, as it would overwrite the filled stack.
    template <std::size_t... I>
    __attribute__((no_sanitize("address", "undefined", "thread")))
    static void spread(const std::uint64_t* slots, std::index_sequence<I...>) {
        fill_stack();
        KERNEL(*reinterpret_cast<const P*>(&slots[I])...);
    }
};

extern const Entry* const entries;  // generated by the loader; ends with a null name

// Reports a possible cause of a wrong result, once.
void note(const char* what);

// Ends the program with a report about the current thread.
[[noreturn]] void stop(const char* what, const char* file, int line);

}  // namespace cuda_on_cpu

// Parameters whose default arguments are the caller's file and line.
#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

extern "C" int printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
#define assert(condition) \
    ((condition) ? (void)0 : cuda_on_cpu::stop("assertion fails: " #condition, __FILE__, __LINE__))

[[noreturn]] inline void __trap(CALL_SITE) { cuda_on_cpu::stop("the kernel calls __trap()", file, line); }

#include "warps.h"

#undef CALL_SITE

#include "memory.h"

#include "numbers.h"

#include "directed.h"

#include "special.h"

#include "words.h"

#include "rounding.h"
