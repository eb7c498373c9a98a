// Instructions of PTX that access memory, synchronise threads or multiply matrices. The module ptx.py replaces inline PTX
// of a user's kernel by calls of the functions in this file, ptx_numbers.h and ptx_functions.h.
#pragma once
#include "cuda_pipeline.h"
#include "of_warp.h"

#include "ptx_numbers.h"

#include "ptx_functions.h"

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace ptx_on_cpu {

// --- operands of asm statements

template <typename K, typename X>  // K: uint16_t (constraint h), uint32_t (r), uint64_t (l), float (f) or double (d)
__forceinline__ auto input(X x) {
    if constexpr (std::is_pointer_v<X>) {
        static_assert(sizeof(K) == 8, "a pointer needs the constraint l");
        return (std::uint64_t)(std::uintptr_t)x;
    } else if constexpr (std::is_same_v<K, float>) {
        return bits<std::uint32_t>((float)x);
    } else if constexpr (std::is_same_v<K, double>) {
        return bits<std::uint64_t>((double)x);
    } else {
        static_assert(!std::is_floating_point_v<X>, "a floating-point number needs the constraint f or d");
        return (K)x;
    }
}

template <typename K, typename Y, typename R>
__forceinline__ void output(Y& y, R value) {
    if constexpr (std::is_floating_point_v<K>) y = (Y)bits<K>(value);
    else y = (Y)value;
}

inline int thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline std::uint32_t lanes_below() { return (1u << cuda_on_cpu::lane()) - 1; }
inline std::uint32_t lane_bit() { return 1u << cuda_on_cpu::lane(); }

// --- memory

template <typename T>
__forceinline__ T* global(std::uint64_t address) { return reinterpret_cast<T*>(address); }
template <typename T>
__forceinline__ T* shared(std::uint64_t address) { return static_cast<T*>(cuda_on_cpu::from_shared(address)); }

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
    T v[N];
};

template <typename T, int N>
__forceinline__ void store_strong(Vector<T, N>* to, const Vector<T, N>& value) {
    for (int i = 0; i < N; ++i) const_cast<volatile T&>(to->v[i]) = value.v[i];
}

template <typename T, int N>
__forceinline__ Vector<T, N> load_strong(const Vector<T, N>* from) {
    Vector<T, N> value;
    for (int i = 0; i < N; ++i) value.v[i] = const_cast<const volatile T&>(from->v[i]);
    return value;
}

template <typename T, int N>
__forceinline__ Vector<T, N> load_constant(const Vector<T, N>* from) {
    cuda_on_cpu::read_only(from, sizeof *from);
    return *from;
}

template <typename T, typename Op>
__forceinline__ T atom(T* pointer, Op op) {
    cuda_on_cpu::atomic(pointer, sizeof *pointer);
    return cuda_on_cpu::modified(pointer, op);
}

template <typename T>
__forceinline__ T atom_cas(T* pointer, T expected, T value) {
    cuda_on_cpu::comparison(pointer, sizeof *pointer, bits<std::uint64_t>(expected));
    return cuda_on_cpu::modified(pointer, [&](const T& old) -> T { return old == expected ? value : old; });
}

// --- exchanges among the lanes of a warp

struct Shuffled {
    std::uint32_t value;
    bool inside;  // the source lane is in the segment of the own lane
};

// kind: 'u'p, 'd'own, 'b'utterfly or 'i'ndex. control: bits 0 to 4 limit the source lane, bits 8 to 12 select the segment.
__forceinline__ Shuffled shfl(char kind, std::uint32_t value, int by, unsigned control, unsigned mask, CALL_SITE) {
    const int lane = cuda_on_cpu::lane(), segment = control >> 8 & 31, first = lane & segment;
    const int limit = first | (control & 31 & ~segment);
    by &= 31;
    int source = kind == 'u' ? lane - by : kind == 'd' ? lane + by : kind == 'b' ? lane ^ by : first | (by & ~segment);
    const bool inside = kind == 'u' ? source >= limit : source <= limit;
    if (!inside) source = lane;
    return {cuda_on_cpu::shuffle(mask, value, source, file, line), inside};
}

// --- barriers

__forceinline__ void bar(int id, int threads, bool waits, CALL_SITE) {
    if (threads < 0) threads = (blockDim.x * blockDim.y * blockDim.z + 31) / 32 * 32;
    if (id < 0 || id > 15) cuda_on_cpu::stop("a barrier has a number from 0 to 15", file, line);
    if (threads == 0 || threads % 32) {
        cuda_on_cpu::stop("the number of threads of a barrier must be a multiple of 32", file, line);
    }
    cuda_on_cpu::named_barrier(id, threads, waits, file, line);
}

// The content of an mbarrier object. The fill bytes of unwritten memory do not equal MARK.
struct Mbarrier {
    static constexpr unsigned MARK = 2;
    std::uint64_t pending : 20, expected : 20, phase : 1;  // phase: parity of the current phase
    std::int64_t bytes : 21;
    std::uint64_t mark : 2;
};
static_assert(sizeof(Mbarrier) == 8);

// Returns the object with which races.cpp identifies the arrivals of a phase: two bytes alternate.
inline const void* arrivals(const Mbarrier* barrier, unsigned phase) {
    return reinterpret_cast<const char*>(barrier) + phase;
}

__forceinline__ Mbarrier read_mbarrier(Mbarrier* barrier, const char* file, int line) {
    const Mbarrier now = atom(barrier, [](Mbarrier old) { return old; });
    if (now.mark != Mbarrier::MARK) cuda_on_cpu::stop("the mbarrier object is not initialised", file, line);
    return now;
}

__forceinline__ void mbarrier_init(Mbarrier* barrier, std::uint32_t count, CALL_SITE) {
    if (count == 0 || count >= 1u << 20) cuda_on_cpu::stop("an mbarrier's count is from 1 to 2^20 - 1", file, line);
    *barrier = {count, count, 0, 0, Mbarrier::MARK};
    cuda_on_cpu::begin_meeting(arrivals(barrier, 0));
    cuda_on_cpu::begin_meeting(arrivals(barrier, 1));
}

// Arrives `count` times, after expecting the arrival of `bytes` more bytes. Returns the state before the arrival.
__forceinline__ std::uint64_t mbarrier_arrive(Mbarrier* barrier, std::uint32_t count, int bytes, CALL_SITE) {
    Mbarrier now = read_mbarrier(barrier, file, line);
    const std::uint64_t state = now.phase;
    if (count > now.pending) cuda_on_cpu::stop("more arrivals at an mbarrier than its count", file, line);
    if (count) cuda_on_cpu::arrive_at(arrivals(barrier, now.phase));
    now.pending -= count;
    now.bytes += bytes;
    if (now.pending == 0 && now.bytes == 0) {
        now.pending = now.expected;
        now.phase ^= 1;
        cuda_on_cpu::begin_meeting(arrivals(barrier, now.phase));
    }
    cuda_on_cpu::modified(barrier, [&](Mbarrier) { return now; });
    return state;
}

// Returns whether the phase of this parity is complete. Otherwise lets the other threads run.
__forceinline__ bool mbarrier_test(Mbarrier* barrier, unsigned parity, CALL_SITE) {
    const Mbarrier now = read_mbarrier(barrier, file, line);
    if (now.phase != (parity & 1)) {
        cuda_on_cpu::learn_from(arrivals(barrier, parity & 1));
        return true;
    }
    cuda_on_cpu::poll(file, line);
    return false;
}

// --- asynchronous copies

__forceinline__ void copy_async(void* to, const void* from, unsigned bytes, unsigned read) {
    __pipeline_memcpy_async(to, from, bytes, read < bytes ? bytes - read : 0);
}

inline void wait_for_copies() {
    __pipeline_commit();
    __pipeline_wait_prior(0);
}

// --- matrices of a warp

template <int N>
struct Registers {
    std::uint32_t v[N];
};

// Loads N matrices of 8 x 8 numbers of 16 bits. Lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
template <int N, bool TRANSPOSED>
__forceinline__ Registers<N> ldmatrix(const std::uint16_t* row, CALL_SITE) {
    const int lane = cuda_on_cpu::lane(), g = lane / 4, t = lane % 4;
    if (lane < 8 * N && reinterpret_cast<std::uintptr_t>(row) % 16) {
        cuda_on_cpu::stop("ldmatrix: the address of a row is not a multiple of 16 bytes", file, line);
    }
    const OfWarp<const std::uint16_t*> rows(row, file, line);
    Registers<N> result;
    for (int i = 0; i < N; ++i) {
        const std::uint16_t low = TRANSPOSED ? rows[8 * i + 2 * t][g] : rows[8 * i + g][2 * t];
        const std::uint16_t high = TRANSPOSED ? rows[8 * i + 2 * t + 1][g] : rows[8 * i + g][2 * t + 1];
        result.v[i] = low | (std::uint32_t)high << 16;
    }
    return result;
}

struct TF32 {
    float value;
    explicit TF32(std::uint32_t bits) : value(__uint_as_float(bits & 0xffffe000u)) {}
    operator float() const { return value; }
};
template <int M>
struct FP8 {
    std::uint8_t bits;
    operator double() const { return fp8_value<M>(bits); }
};

// Element e of a register that holds numbers of type T.
template <typename T>
float element(std::uint32_t reg, int e) {
    if constexpr (std::is_same_v<T, TF32>) return TF32(reg);
    else return (float)(double)bits<T>(reg >> 8 * sizeof(T) * e);
}

template <int E>
struct Operands {  // a lane's operands of mma, with E numbers in each register
    float a[4][E], b[2][E];
};

// Adds the product of a 16 x K matrix A and a K x 8 matrix B to C. A, B: types of numbers. R: registers of A, 2 or 4.
// Sums of integers are exact, as each product is less than 2^16. The sums of other numbers are sums of float.
template <typename A, typename B, typename S, int R>
__attribute__((noinline)) UNCHECKED void mma(S (&c)[4], const std::uint32_t* a, const std::uint32_t* b, CALL_SITE) {
    constexpr int E = 4 / sizeof(A);
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    Operands<E> own = {};
    for (int e = 0; e < E; ++e) {
        for (int i = 0; i < R; ++i) own.a[i][e] = element<A>(a[i], e);
        for (int i = 0; i < R / 2; ++i) own.b[i][e] = element<B>(b[i], e);
    }
    const OfWarp<Operands<E>> lanes(own, file, line);
    for (int j = 0; j < 4; ++j) {
        for (int k = 0; k < 2 * R * E; ++k) {  // k = (4 h + l) E + e
            const int h = k / (4 * E), l = k / E % 4, e = k % E;
            const float product = lanes[4 * g + l].a[2 * h + j / 2][e] * lanes[4 * (2 * t + j % 2) + l].b[h][e];
            if constexpr (std::is_integral_v<S>) c[j] = (S)((std::uint32_t)c[j] + (std::uint32_t)(std::int32_t)product);
            else c[j] += product;
        }
    }
}

// mma with float or int sums in four registers, or with f16 sums in two.
template <typename A, typename B, typename S, int R>
__forceinline__ Registers<4> mma_sync(const Registers<R>& a, const Registers<R / 2>& b, const Registers<4>& c, CALL_SITE) {
    S sums[4];
    Registers<4> result;
    for (int j = 0; j < 4; ++j) sums[j] = bits<S>(c.v[j]);
    mma<A, B, S, R>(sums, a.v, b.v, file, line);
    for (int j = 0; j < 4; ++j) result.v[j] = bits<std::uint32_t>(sums[j]);
    return result;
}
template <typename A, typename B, typename S, int R>
__forceinline__ Registers<2> mma_sync(const Registers<R>& a, const Registers<R / 2>& b, const Registers<2>& c, CALL_SITE) {
    float sums[4];
    Registers<2> result;
    for (int j = 0; j < 4; ++j) sums[j] = (float)F16{(std::uint16_t)(c.v[j / 2] >> 16 * (j % 2))};
    mma<A, B, float, R>(sums, a.v, b.v, file, line);
    for (int i = 0; i < 2; ++i) {
        const Pair<F16> pair = {nearest<F16>(sums[2 * i]), nearest<F16>(sums[2 * i + 1])};
        result.v[i] = bits<std::uint32_t>(pair);
    }
    return result;
}

}  // namespace ptx_on_cpu

#undef CALL_SITE
