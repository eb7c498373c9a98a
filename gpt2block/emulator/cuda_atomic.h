// cuda::atomic, cuda::atomic_ref and fences. A release makes earlier accesses of its thread visible to a thread that
// reads the value; a relaxed operation does not, so that races.cpp finds a missing release. Each load acquires.
#pragma once
#include <cuda_std.h>

namespace cuda {

enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread = 10 };

using ::std::memory_order;
using ::std::memory_order_acq_rel, ::std::memory_order_acquire, ::std::memory_order_consume;
using ::std::memory_order_relaxed, ::std::memory_order_release, ::std::memory_order_seq_cst;

}  // namespace cuda

namespace cuda_on_cpu_atomic {

using cuda::memory_order, cuda::memory_order_seq_cst, cuda::thread_scope;

inline bool releases(memory_order order) { return order >= cuda::memory_order_release; }

// Operations of an atomic variable. Self has place(), the address of the value.
template <typename Self, typename T, thread_scope SCOPE>
class Operations {
    static_assert(::std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "the emulator has atomics of at most 8 bytes");
    typedef ::std::conditional_t<::std::is_pointer_v<T>, ::std::ptrdiff_t, T> Difference;

    T* place() const { return const_cast<T*>(static_cast<const Self*>(this)->place()); }

    template <typename Op>
    __forceinline__ T modify(memory_order order, Op op) const {
        if (releases(order)) cuda_on_cpu::fence(SCOPE < cuda::thread_scope_block);
        cuda_on_cpu::atomic(place(), sizeof(T));
        return cuda_on_cpu::modified(place(), op);
    }

public:
    __forceinline__ T load(memory_order = memory_order_seq_cst) const {
        cuda_on_cpu::atomic_read(place(), sizeof(T));
        return cuda_on_cpu::modified(place(), [](const T& old) -> T { return old; });
    }
    __forceinline__ operator T() const { return load(); }

    __forceinline__ bool compare_exchange_strong(T& expected, T value, memory_order order = memory_order_seq_cst,
                                                 memory_order = memory_order_seq_cst) const {
        typedef ::std::uint64_t Bits;
        const Bits compared = cuda_on_cpu::bits<Bits>(expected);
        if (releases(order)) cuda_on_cpu::fence(SCOPE < cuda::thread_scope_block);
        cuda_on_cpu::comparison(place(), sizeof(T), compared);
        const T old = cuda_on_cpu::modified(place(), [&](const T& old) -> T {
            return cuda_on_cpu::bits<Bits>(old) == compared ? value : old;
        });
        if (cuda_on_cpu::bits<Bits>(old) == compared) return true;
        expected = old;
        return false;
    }
    __forceinline__ bool compare_exchange_weak(T& expected, T value, memory_order order = memory_order_seq_cst,
                                               memory_order = memory_order_seq_cst) const {
        return compare_exchange_strong(expected, value, order);
    }

#define MODIFY(name, type, result)                                                          \
    __forceinline__ T name(type value, memory_order order = memory_order_seq_cst) const {   \
        return modify(order, [&](const T& old) -> T { return result; });                    \
    }
    MODIFY(exchange, T, ((void)old, value))
    MODIFY(fetch_add, Difference, old + value)
    MODIFY(fetch_sub, Difference, old - value)
    MODIFY(fetch_min, T, value < old ? value : old)
    MODIFY(fetch_max, T, old < value ? value : old)
    MODIFY(fetch_and, T, old & value)
    MODIFY(fetch_or, T, old | value)
    MODIFY(fetch_xor, T, old ^ value)
#undef MODIFY
    __forceinline__ void store(T value, memory_order order = memory_order_seq_cst) const { exchange(value, order); }
    __forceinline__ T operator+=(Difference value) const { return fetch_add(value) + value; }
    __forceinline__ T operator-=(Difference value) const { return fetch_sub(value) - value; }
    __forceinline__ T operator&=(T value) const { return fetch_and(value) & value; }
    __forceinline__ T operator|=(T value) const { return fetch_or(value) | value; }
    __forceinline__ T operator^=(T value) const { return fetch_xor(value) ^ value; }
    __forceinline__ T operator++() const { return fetch_add(1) + 1; }
    __forceinline__ T operator--() const { return fetch_sub(1) - 1; }
    __forceinline__ T operator++(int) const { return fetch_add(1); }
    __forceinline__ T operator--(int) const { return fetch_sub(1); }

    __forceinline__ void wait(T old, memory_order order = memory_order_seq_cst) const {
        while (load(order) == old) cuda_on_cpu::sleep();
    }
    void notify_one() const {}
    void notify_all() const {}
    bool is_lock_free() const { return true; }
    static constexpr bool is_always_lock_free = true;
};

}  // namespace cuda_on_cpu_atomic

namespace cuda {

template <typename T, thread_scope SCOPE = thread_scope_system>
class alignas(sizeof(T)) atomic : public cuda_on_cpu_atomic::Operations<atomic<T, SCOPE>, T, SCOPE> {
    T value_;

public:
    atomic() = default;
    constexpr atomic(T value) : value_(value) {}
    atomic(const atomic&) = delete;
    atomic& operator=(const atomic&) = delete;
    __forceinline__ T operator=(T value) { return this->store(value), value; }
    const T* place() const { return &value_; }
};

template <typename T, thread_scope SCOPE = thread_scope_system>
class atomic_ref : public cuda_on_cpu_atomic::Operations<atomic_ref<T, SCOPE>, T, SCOPE> {
    T* place_;

public:
    explicit atomic_ref(T& value) : place_(&value) {}
    __forceinline__ T operator=(T value) const { return this->store(value), value; }
    const T* place() const { return place_; }
};

inline void atomic_thread_fence(memory_order order, thread_scope scope = thread_scope_system) {
    if (order != memory_order_relaxed) cuda_on_cpu::fence(scope < thread_scope_block);
}

namespace std {
using cuda::memory_order, cuda::memory_order_seq_cst;
template <typename T>
using atomic = cuda::atomic<T>;
template <typename T>
using atomic_ref = cuda::atomic_ref<T>;
}  // namespace std

}  // namespace cuda
