// Loads with cache hints, fences and atomic functions. Included by cuda_on_cpu.h. Functions that access memory are
// always inlined, so that a report names the line of the kernel.
#pragma once

// Cache hints do not change the values that are loaded or stored.
#define LOAD(name)                                  \
    template <typename T>                           \
    __forceinline__ T name(const T* pointer) {      \
        return *pointer;                            \
    }
LOAD(__ldcs)
LOAD(__ldcg)
LOAD(__ldca)
LOAD(__ldlu)
#undef LOAD

// Loads by the read-only cache, which may return old values of memory that the same kernel has changed.
template <typename T>
__forceinline__ T __ldg(const T* pointer) {
    cuda_on_cpu::read_only(pointer, sizeof *pointer);
    return *pointer;
}

template <typename T>
__forceinline__ T __ldcv(const T* pointer) {
    static_assert(std::is_arithmetic_v<T>, "a volatile load is one of a number");
    return *static_cast<const volatile T*>(pointer);
}

#define STORE(name)                                                             \
    template <typename T>                                                       \
    __forceinline__ void name(T* pointer, std::common_type_t<T> value) {        \
        *pointer = value;                                                       \
    }
STORE(__stcs)
STORE(__stcg)
STORE(__stwb)
STORE(__stwt)
#undef STORE

// Fences need no action here, as only one fiber runs at a time and sees all earlier writes; races.cpp is notified.
inline void __threadfence_block() { cuda_on_cpu::fence(false); }
inline void __threadfence() { cuda_on_cpu::fence(true); }
inline void __threadfence_system() { cuda_on_cpu::fence(true); }

inline std::size_t __cvta_generic_to_shared(const void* p) { return cuda_on_cpu::to_shared(p); }
inline void* __cvta_shared_to_generic(std::size_t address) { return cuda_on_cpu::from_shared(address); }
inline std::size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<std::size_t>(p); }
inline void* __cvta_global_to_generic(std::size_t address) { return reinterpret_cast<void*>(address); }

inline void __nanosleep(unsigned) { cuda_on_cpu::sleep(); }

namespace cuda_on_cpu {

// Not instrumented, as atomic() reports atomic accesses to races.cpp.
template <typename T, typename Op>
__attribute__((noinline, no_sanitize("thread"))) T modified(T* pointer, Op op) {
    const T old = *pointer;
    *pointer = op(old);
    return old;
}

template <typename T>
constexpr bool is_word = std::is_integral_v<T> && sizeof(T) >= 4;

}  // namespace cuda_on_cpu

// Defines an atomic function and its versions for the scopes _block and _system, which are emulated alike.
#define ATOMIC_OF_SCOPE(name, types, result)                                                    \
    template <typename T>                                                                       \
    __forceinline__ T name(T* pointer, std::common_type_t<T> value) {                           \
        static_assert(types, #name " has no such type");                                        \
        cuda_on_cpu::atomic(pointer, sizeof *pointer);                                          \
        return cuda_on_cpu::modified(pointer, [&](const T& old) -> T { return result; });       \
    }
#define ATOMIC(name, types, result)                   \
    ATOMIC_OF_SCOPE(name, types, result)              \
    ATOMIC_OF_SCOPE(name##_block, types, result)      \
    ATOMIC_OF_SCOPE(name##_system, types, result)

ATOMIC(atomicAdd, !std::is_integral_v<T> || cuda_on_cpu::is_word<T>, old + value)
ATOMIC(atomicSub, cuda_on_cpu::is_word<T>, old - value)
ATOMIC(atomicExch, sizeof(T) >= 4, value)
ATOMIC(atomicMin, cuda_on_cpu::is_word<T>, value < old ? value : old)
ATOMIC(atomicMax, cuda_on_cpu::is_word<T>, old < value ? value : old)
ATOMIC(atomicInc, (std::is_same_v<T, unsigned>), old >= value ? 0 : old + 1)
ATOMIC(atomicDec, (std::is_same_v<T, unsigned>), old == 0 || old > value ? value : old - 1)
ATOMIC(atomicAnd, cuda_on_cpu::is_word<T>, old & value)
ATOMIC(atomicOr, cuda_on_cpu::is_word<T>, old | value)
ATOMIC(atomicXor, cuda_on_cpu::is_word<T>, old ^ value)
#undef ATOMIC
#undef ATOMIC_OF_SCOPE

#define COMPARE_AND_SWAP(name)                                                                                  \
    template <typename T>                                                                                       \
    __forceinline__ T name(T* pointer, std::common_type_t<T> expected, std::common_type_t<T> value) {           \
        static_assert(std::is_integral_v<T> && sizeof(T) >= 2, #name " has no such type");                      \
        cuda_on_cpu::comparison(pointer, sizeof *pointer, cuda_on_cpu::bits<std::uint64_t>(expected));          \
        return cuda_on_cpu::modified(pointer, [&](const T& old) -> T { return old == expected ? value : old; }); \
    }
COMPARE_AND_SWAP(atomicCAS)
COMPARE_AND_SWAP(atomicCAS_block)
COMPARE_AND_SWAP(atomicCAS_system)
#undef COMPARE_AND_SWAP
