// Barriers of a block, and exchanges among the lanes of a warp. Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

// Returns the value of lane `source`. For a lane that is not in the mask or does not exist, returns fill bytes: NaN or
// a large number; as integer divided by 8, so that a few additions do not overflow. Inlined, as in low_precision.h.
template <typename T>
__forceinline__ T shuffle(unsigned mask, T value, int source, const char* file, int line) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    const Sought sought = {source % 32, type_letter<T>()};
    const Gathered& given = gather(mask, bits<std::uint64_t>(value), file, line, 0, sought);
    const T other = bits<T>(given.values[source % 32]);
    if constexpr (std::is_integral_v<T>) return given.lanes >> source % 32 & 1 ? other : other / 8;
    return other;
}

// Waits at a barrier of the block, and returns the number of threads whose predicate is true.
int counted(bool predicate, const char* file, int line);

template <typename T, typename Op>
T reduced(unsigned mask, T value, Op op, const char* file, int line) {
    const Gathered& given = gather(mask, bits<std::uint64_t>(value), file, line, 0, {-1, type_letter<T>()});
    T result{};
    bool first = true;
    for (int i = 0; i < 32; ++i) {
        if (!(given.lanes >> i & 1)) continue;
        const T other = bits<T>(given.values[i]);
        result = first ? other : op(result, other);
        first = false;
    }
    return result;
}

}  // namespace cuda_on_cpu

inline void __syncthreads(CALL_SITE) { cuda_on_cpu::barrier(file, line); }

inline int __syncthreads_count(int predicate, CALL_SITE) { return cuda_on_cpu::counted(predicate, file, line); }

inline int __syncthreads_or(int predicate, CALL_SITE) { return cuda_on_cpu::counted(predicate, file, line) > 0; }

inline int __syncthreads_and(int predicate, CALL_SITE) { return !cuda_on_cpu::counted(!predicate, file, line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, CALL_SITE) { cuda_on_cpu::gather(mask, 0, file, line); }

template <typename T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32, CALL_SITE) {
    const int first = cuda_on_cpu::lane() & -width;
    return cuda_on_cpu::shuffle(mask, value, first + (source & (width - 1)), file, line);
}

template <typename T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CALL_SITE) {
    const int lane = cuda_on_cpu::lane(), source = lane - (int)delta;
    return cuda_on_cpu::shuffle(mask, value, source < (lane & -width) ? lane : source, file, line);
}

template <typename T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CALL_SITE) {
    const int lane = cuda_on_cpu::lane(), source = lane + (int)delta;
    return cuda_on_cpu::shuffle(mask, value, source >= (lane & -width) + width ? lane : source, file, line);
}

template <typename T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CALL_SITE) {
    const int lane = cuda_on_cpu::lane(), source = lane ^ lane_mask;
    return cuda_on_cpu::shuffle(mask, value, source >= (lane & -width) + width ? lane : source, file, line);
}

inline unsigned __activemask(CALL_SITE) { return cuda_on_cpu::active_lanes(file, line); }

inline unsigned __ballot_sync(unsigned mask, int predicate, CALL_SITE) {
    const cuda_on_cpu::Gathered& given = cuda_on_cpu::gather(mask, predicate != 0, file, line);
    unsigned lanes = 0;
    for (int i = 0; i < 32; ++i) lanes |= (unsigned)(given.values[i] == 1) << i;
    return lanes;
}

inline int __any_sync(unsigned mask, int predicate, CALL_SITE) { return __ballot_sync(mask, predicate, file, line) != 0; }

inline int __all_sync(unsigned mask, int predicate, CALL_SITE) { return !__ballot_sync(mask, !predicate, file, line); }

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, CALL_SITE) {
    const std::uint64_t own = cuda_on_cpu::bits<std::uint64_t>(value);
    const cuda_on_cpu::Gathered& given = cuda_on_cpu::gather(mask, own, file, line);
    unsigned lanes = 0;
    for (int i = 0; i < 32; ++i) lanes |= (given.lanes >> i & 1 && given.values[i] == own ? 1u : 0u) << i;
    return lanes;
}

template <typename T>
unsigned __match_all_sync(unsigned mask, T value, int* all, CALL_SITE) {
    const unsigned lanes = __match_any_sync(mask, value, file, line);
    const unsigned met = __ballot_sync(mask, 1, file, line);
    *all = lanes == met;
    return *all ? met : 0;
}

// Defines reductions of int or unsigned over a warp, which CUDA has since compute capability 8.0.
#define REDUCE(name, result)                                                                          \
    template <typename T>                                                                             \
    T name(unsigned mask, T value, CALL_SITE) {                                                       \
        static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "expected int or unsigned"); \
        const auto op = [](T a, T b) -> T { return result; };                                         \
        return cuda_on_cpu::reduced(mask, value, op, file, line);                                     \
    }

REDUCE(__reduce_add_sync, (T)((unsigned)a + (unsigned)b))
REDUCE(__reduce_min_sync, b < a ? b : a)
REDUCE(__reduce_max_sync, a < b ? b : a)
REDUCE(__reduce_and_sync, a & b)
REDUCE(__reduce_or_sync, a | b)
REDUCE(__reduce_xor_sync, a ^ b)
#undef REDUCE
