// The part of CUB that kernels use: reductions and scans of a block or a warp, and loads and stores of a block.
//
// TempStorage is shared memory, has at most the size of CUB's, and is written and read in each call, so that races.cpp
// finds a reuse without a barrier. A result that CUB does not specify, such as a reduction's in threads other than the
// first, is fill bytes. The functions are inlined, so that a report names the line of the kernel.
#pragma once
#include <cuda_std.h>
#include <of_warp.h>

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cub_on_cpu {

inline int thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline int threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Values that threads pass to other threads of their warp.
template <typename T>
class Values {
    alignas(T) static inline unsigned char bytes_[1024 * sizeof(T)];

public:
    UNCHECKED static void give(const T& value) { ::std::memcpy(bytes_ + thread() * sizeof(T), &value, sizeof(T)); }
    UNCHECKED static T of(int thread) { return *reinterpret_cast<const T*>(bytes_ + thread * sizeof(T)); }
};

template <typename T>
UNCHECKED T unspecified() {
    if constexpr (::std::is_same_v<T, bool>) return true;
    T value;
    ::std::memset(static_cast<void*>(&value), cuda_on_cpu::fill_byte(), sizeof value);
    if constexpr (::std::is_integral_v<T>) return value / 8;  // a few additions do not overflow
    return value;
}

// Returns the result of op on the values of the threads first to last - 1, in this order.
template <typename T, typename Op>
T folded(int first, int last, Op& op) {
    if (first >= last) return unspecified<T>();
    T total = Values<T>::of(first);
    for (int i = first + 1; i < last; ++i) total = op(total, Values<T>::of(i));
    return total;
}

// Reads a byte of a TempStorage. The compiler must not remove the read, although the value is not used.
__forceinline__ void read(const unsigned char& byte) {
    [[maybe_unused]] volatile unsigned char value = byte;
}

template <int X, int Y, int Z>
void check_block(const char* name, const char* file, int line) {
    if (blockDim.x == X && blockDim.y == Y && blockDim.z == Z) return;
    static char text[160];
    const char* what = "cub::%s is for a block of (%d, %d, %d) threads, but the block has (%u, %u, %u)";
    __builtin_snprintf(text, sizeof text, what, name, X, Y, Z, blockDim.x, blockDim.y, blockDim.z);
    cuda_on_cpu::stop(text, file, line);
}

struct WarpStorage {
    unsigned char storage;
};

// A logical warp: the lanes of a warp that contain the current thread, in groups of LANES lanes.
template <int LANES>
struct LogicalWarp {
    static_assert(LANES > 0 && LANES <= 32, "a logical warp has 1 to 32 lanes");
    const int lane = cuda_on_cpu::lane() % LANES, first = thread() - lane;
    const unsigned mask = (0xffffffffu >> (32 - LANES)) << (cuda_on_cpu::lane() - lane);

    void meet(const char* file, int line) const { cuda_on_cpu::gather(mask, 0, file, line); }
};

template <typename T, int WARPS>
struct BlockStorage {
    alignas(T) unsigned char bytes[WARPS * sizeof(T)];
    unsigned char storage;

    __forceinline__ T& warp(int i) { return reinterpret_cast<T*>(bytes)[i]; }
};

// Base class of scans. Self must have scanned(own, op, total, extra, file, line), which returns the result of op on the
// values of the threads before this one, and stores the result of op on the values of all threads in `total`.
template <typename Self, typename T>
class Scans {
    struct Nothing {};

    template <bool INCLUSIVE, typename In, typename Out, typename Op, typename Extra>
    __forceinline__ void scan(const In& in, Out& out, const T* initial, Op op, Extra& extra, const char* file,
                              int line) {
        constexpr bool ARRAY = ::std::is_array_v<Out>, PREFIXED = Self::template is_prefix<Extra>;
        constexpr int N = ARRAY ? ::std::extent_v<Out> : 1;
        T items[N];
        for (int i = 0; i < N; ++i) {
            if constexpr (ARRAY) {
                items[i] = in[i];
            } else {
                items[i] = in;
            }
        }
        T own = items[0], total = own;
        for (int i = 1; i < N; ++i) own = op(own, items[i]);
        bool any = static_cast<Self*>(this)->rank() > 0;
        T before = static_cast<Self*>(this)->scanned(own, op, total, file, line);
        if constexpr (PREFIXED) {
            const T prefix = static_cast<Self*>(this)->prefix(extra, total, file, line);
            before = any ? op(prefix, before) : prefix;
            any = true;
        } else if constexpr (::std::is_same_v<Extra, T>) {
            extra = total;
        }
        if (initial) before = any ? op(*initial, before) : *initial;
        any = any || initial;
        for (int i = 0; i < N; ++i) {
            const T item = items[i], after = any ? op(before, item) : item;
            const T result = INCLUSIVE ? after : any ? before : unspecified<T>();
            if constexpr (ARRAY) {
                out[i] = result;
            } else {
                out = result;
            }
            before = after;
            any = true;
        }
    }

public:
#define SCAN(kind, inclusive)                                                                                     \
    template <typename In, typename Out>                                                                          \
    __forceinline__ void kind##Sum(const In& in, Out& out, CALL_SITE) {                                           \
        Nothing nothing;                                                                                          \
        const T zero{};                                                                                           \
        scan<inclusive>(in, out, inclusive ? nullptr : &zero, ::std::plus<>(), nothing, file, line);              \
    }                                                                                                             \
    template <typename In, typename Out, typename Extra>                                                          \
    __forceinline__ void kind##Sum(const In& in, Out& out, Extra& extra, CALL_SITE) {                             \
        const T zero{};                                                                                           \
        const bool begins = !inclusive && ::std::is_same_v<Extra, T>;                                             \
        scan<inclusive>(in, out, begins ? &zero : nullptr, ::std::plus<>(), extra, file, line);                   \
    }                                                                                                             \
    template <typename In, typename Out, typename Op>                                                             \
    __forceinline__ void kind##Scan(const In& in, Out& out, Op op, CALL_SITE) {                                   \
        Nothing nothing;                                                                                          \
        scan<inclusive>(in, out, nullptr, op, nothing, file, line);                                               \
    }                                                                                                             \
    template <typename In, typename Out, typename A, typename B>                                                  \
    __forceinline__ void kind##Scan(const In& in, Out& out, A first, B&& second, CALL_SITE) {                     \
        if constexpr (::std::is_invocable_v<A, T, T>) {                                                           \
            scan<inclusive>(in, out, nullptr, first, second, file, line);                                         \
        } else {                                                                                                  \
            Nothing nothing;                                                                                      \
            const T initial = first;                                                                              \
            scan<inclusive>(in, out, &initial, second, nothing, file, line);                                      \
        }                                                                                                         \
    }                                                                                                             \
    template <typename In, typename Out, typename Op>                                                             \
    __forceinline__ void kind##Scan(const In& in, Out& out, T initial, Op op, T& total, CALL_SITE) {              \
        scan<inclusive>(in, out, &initial, op, total, file, line);                                                \
    }
    SCAN(Inclusive, true)
    SCAN(Exclusive, false)
#undef SCAN
};

}  // namespace cub_on_cpu

namespace cub {

using Sum = ::std::plus<>;
using Max = cuda::maximum<>;
using Min = cuda::minimum<>;

template <typename Key, typename Value>
struct KeyValuePair {
    Key key;
    Value value;
};

#define ARG(name, op)                                                        \
    struct name {                                                            \
        template <typename P>                                                \
        P operator()(const P& a, const P& b) const {                         \
            const bool tie = a.value == b.value && b.key < a.key;            \
            return b.value op a.value || tie ? b : a;                        \
        }                                                                    \
    };
ARG(ArgMax, >)
ARG(ArgMin, <)
#undef ARG

enum BlockReduceAlgorithm {
    BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY,
    BLOCK_REDUCE_RAKING,
    BLOCK_REDUCE_WARP_REDUCTIONS,
};
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };
enum BlockLoadAlgorithm {
    BLOCK_LOAD_DIRECT,
    BLOCK_LOAD_STRIPED,
    BLOCK_LOAD_VECTORIZE,
    BLOCK_LOAD_TRANSPOSE,
    BLOCK_LOAD_WARP_TRANSPOSE,
    BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED,
};
enum BlockStoreAlgorithm {
    BLOCK_STORE_DIRECT,
    BLOCK_STORE_STRIPED,
    BLOCK_STORE_VECTORIZE,
    BLOCK_STORE_TRANSPOSE,
    BLOCK_STORE_WARP_TRANSPOSE,
    BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED,
};

// Defines the constructors of a class that uses a TempStorage.
#define USES_STORAGE(name)                                   \
public:                                                      \
    typedef Storage TempStorage;                             \
    explicit name(TempStorage& storage) : storage_(storage) {} \
    name() : storage_(own()) {}                              \
                                                             \
private:                                                     \
    static TempStorage& own() {                              \
        __shared__ TempStorage storage;                      \
        return storage;                                      \
    }                                                        \
    TempStorage& storage_;

// Defines the calls of a reduction besides Reduce(value, op, count, file, line). WHOLE: number of values without count.
#define REDUCTIONS(WHOLE)                                                                   \
    template <typename Op>                                                                  \
    __forceinline__ T Reduce(T value, Op op, CALL_SITE) {                                   \
        return Reduce(value, op, WHOLE, file, line);                                        \
    }                                                                                       \
    template <int N, typename Op>                                                           \
    __forceinline__ T Reduce(T (&items)[N], Op op, CALL_SITE) {                             \
        T own = items[0];                                                                   \
        for (int i = 1; i < N; ++i) own = op(own, items[i]);                                \
        return Reduce(own, op, WHOLE, file, line);                                          \
    }                                                                                       \
    __forceinline__ T Sum(T value, CALL_SITE) {                                             \
        return Reduce(value, ::std::plus<>(), WHOLE, file, line);                           \
    }                                                                                       \
    template <int N>                                                                        \
    __forceinline__ T Sum(T (&items)[N], CALL_SITE) {                                       \
        return Reduce(items, ::std::plus<>(), file, line);                                  \
    }                                                                                       \
    __forceinline__ T Sum(T value, int count, CALL_SITE) {                                  \
        return Reduce(value, ::std::plus<>(), count, file, line);                           \
    }

template <typename T, int LANES = 32, int = 0>
class WarpReduce {
    typedef cub_on_cpu::WarpStorage Storage;
    USES_STORAGE(WarpReduce)

public:
    template <typename Op>
    __forceinline__ T Reduce(T value, Op op, int count, CALL_SITE) {
        const cub_on_cpu::LogicalWarp<LANES> warp;
        cub_on_cpu::Values<T>::give(value);
        if (warp.lane == 0) storage_.storage = 1;
        warp.meet(file, line);
        T result = cub_on_cpu::unspecified<T>();
        const int last = warp.first + count;
        if (warp.lane == 0 && last <= cub_on_cpu::threads()) result = cub_on_cpu::folded<T>(warp.first, last, op);
        warp.meet(file, line);
        cub_on_cpu::read(storage_.storage);
        return result;
    }
    REDUCTIONS(LANES)
};

template <typename T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1, int = 0>
class BlockReduce {
    typedef cub_on_cpu::BlockStorage<T, (X * Y * Z + 31) / 32> Storage;
    USES_STORAGE(BlockReduce)

public:
    template <typename Op>
    __forceinline__ T Reduce(T value, Op op, int count, CALL_SITE) {
        cub_on_cpu::check_block<X, Y, Z>("BlockReduce", file, line);
        const cub_on_cpu::LogicalWarp<32> warp;
        cub_on_cpu::Values<T>::give(value);
        warp.meet(file, line);
        if (warp.lane == 0 && warp.first < count) {
            const int end = warp.first + 32 < count ? warp.first + 32 : count;
            const T total = cub_on_cpu::folded<T>(warp.first, end, op);
            storage_.warp(warp.first / 32) = total;
        }
        if (cub_on_cpu::thread() == 0) storage_.storage = 1;
        cuda_on_cpu::barrier(file, line);
        cub_on_cpu::read(storage_.storage);
        if (cub_on_cpu::thread() > 0 || count < 1) return cub_on_cpu::unspecified<T>();
        T total = storage_.warp(0);
        for (int i = 1; 32 * i < count; ++i) total = op(total, storage_.warp(i));
        return total;
    }
    REDUCTIONS(X * Y * Z)
};
#undef REDUCTIONS

template <typename T, int LANES = 32, int ARCH = 0>
class WarpScan : public cub_on_cpu::Scans<WarpScan<T, LANES, ARCH>, T> {
    typedef cub_on_cpu::WarpStorage Storage;
    USES_STORAGE(WarpScan)

public:
    template <typename Extra>
    static constexpr bool is_prefix = false;

    static int rank() { return cuda_on_cpu::lane() % LANES; }

    template <typename Op>
    __forceinline__ T scanned(T own, Op op, T& total, const char* file, int line) {
        const cub_on_cpu::LogicalWarp<LANES> warp;
        const int end = warp.first + LANES < cub_on_cpu::threads() ? warp.first + LANES : cub_on_cpu::threads();
        cub_on_cpu::Values<T>::give(own);
        if (warp.lane == 0) storage_.storage = 1;
        warp.meet(file, line);
        total = cub_on_cpu::folded<T>(warp.first, end, op);
        const T before = cub_on_cpu::folded<T>(warp.first, warp.first + warp.lane, op);
        warp.meet(file, line);
        cub_on_cpu::read(storage_.storage);
        return before;
    }

    T Broadcast(T value, unsigned lane, CALL_SITE) {
        const cub_on_cpu::LogicalWarp<LANES> warp;
        cub_on_cpu::Values<T>::give(value);
        warp.meet(file, line);
        const T other = cub_on_cpu::Values<T>::of(warp.first + lane);
        warp.meet(file, line);
        return other;
    }
};

template <typename T, int X, BlockScanAlgorithm ALGORITHM = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int ARCH = 0>
class BlockScan : public cub_on_cpu::Scans<BlockScan<T, X, ALGORITHM, Y, Z, ARCH>, T> {
    typedef cub_on_cpu::BlockStorage<T, (X * Y * Z + 31) / 32 + 1> Storage;
    USES_STORAGE(BlockScan)

public:
    // Whether the last argument of a scan is a function that returns the prefix of the block.
    template <typename Extra>
    static constexpr bool is_prefix = ::std::is_invocable_v<Extra&, T>;

    static int rank() { return cub_on_cpu::thread(); }

    template <typename Op>
    __forceinline__ T scanned(T own, Op op, T& total, const char* file, int line) {
        cub_on_cpu::check_block<X, Y, Z>("BlockScan", file, line);
        const cub_on_cpu::LogicalWarp<32> warp;
        const int end = warp.first + 32 < X * Y * Z ? warp.first + 32 : X * Y * Z;
        cub_on_cpu::Values<T>::give(own);
        warp.meet(file, line);
        T before = cub_on_cpu::folded<T>(warp.first, warp.first + warp.lane, op);
        if (warp.lane == 0) {
            const T sum = cub_on_cpu::folded<T>(warp.first, end, op);
            storage_.warp(warp.first / 32) = sum;
        }
        if (rank() == 0) storage_.storage = 1;
        cuda_on_cpu::barrier(file, line);
        cub_on_cpu::read(storage_.storage);
        total = storage_.warp(0);
        for (int i = 1; 32 * i < X * Y * Z; ++i) {
            if (32 * i == warp.first) before = warp.lane == 0 ? total : op(total, before);
            total = op(total, storage_.warp(i));
        }
        return before;
    }

    // The first warp calls the function with the total of the block; the result of the first thread counts.
    template <typename Prefix>
    __forceinline__ T prefix(Prefix& function, T total, const char* file, int line) {
        constexpr int PLACE = (X * Y * Z + 31) / 32;
        if (rank() < 32) {
            const T own = function(total);
            if (rank() == 0) storage_.warp(PLACE) = own;
        }
        cuda_on_cpu::barrier(file, line);
        const T given = storage_.warp(PLACE);
        return given;
    }
};

// Defines BlockLoad or BlockStore. Items of a thread are adjacent (blocked), or X threads apart (striped). Algorithms
// that transpose use the TempStorage, and all threads of the block must call them.
#define MOVE(ALGORITHMS, verb, moved)                                                                      \
    template <typename T, int X, int N, Block##verb##Algorithm ALGORITHM = ALGORITHMS##_DIRECT, int Y = 1, \
              int Z = 1, int = 0>                                                                          \
    class Block##verb {                                                                                    \
        typedef cub_on_cpu::WarpStorage Storage;                                                           \
        USES_STORAGE(Block##verb)                                                                          \
                                                                                                           \
    public:                                                                                                \
        template <typename Pointer>                                                                        \
        __forceinline__ void verb(Pointer array, T (&items)[N], CALL_SITE) {                               \
            verb(array, items, X * Y * Z * N, file, line);                                                 \
        }                                                                                                  \
        template <typename Pointer>                                                                        \
        __forceinline__ void verb(Pointer array, T (&items)[N], int count, CALL_SITE) {                    \
            cub_on_cpu::check_block<X, Y, Z>("Block" #verb, file, line);                                   \
            const bool transposes = ALGORITHM >= ALGORITHMS##_TRANSPOSE;                                   \
            if (transposes && cub_on_cpu::thread() == 0) storage_.storage = 1;                             \
            if (transposes) cuda_on_cpu::barrier(file, line);                                              \
            for (int i = 0; i < N; ++i) {                                                                  \
                const int at = ALGORITHM == ALGORITHMS##_STRIPED ? i * X * Y * Z + cub_on_cpu::thread()    \
                                                    : cub_on_cpu::thread() * N + i;                        \
                if (at < count) moved;                                                                     \
            }                                                                                              \
            if (transposes) cub_on_cpu::read(storage_.storage);                                            \
        }
MOVE(BLOCK_LOAD, Load, items[i] = array[at])
        template <typename Pointer>
        __forceinline__ void Load(Pointer array, T (&items)[N], int count, T otherwise, CALL_SITE) {
            for (T& item : items) item = otherwise;
            Load(array, items, count, file, line);
        }
    };
MOVE(BLOCK_STORE, Store, array[at] = items[i])
    };
#undef MOVE
#undef USES_STORAGE

}  // namespace cub

#undef CALL_SITE
