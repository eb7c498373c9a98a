// The part of cooperative groups that the kernels use: a block, and its tiles of at most a warp. The loader puts the
// kernel file and its includes into an unnamed namespace, so this header includes nothing itself.
#pragma once

namespace cooperative_groups {

class thread_block {
public:
    static unsigned thread_rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        cuda_on_cpu::barrier(file, line);
    }
};

inline thread_block this_thread_block() { return {}; }

template <unsigned SIZE, typename Parent = thread_block>
class thread_block_tile {
    static_assert(SIZE > 0 && SIZE <= 32 && (SIZE & (SIZE - 1)) == 0, "a tile is a power of two of at most 32 threads");

public:
    unsigned thread_rank() const { return cuda_on_cpu::lane() % SIZE; }
    unsigned meta_group_rank() const { return thread_block::thread_rank() / SIZE; }
    unsigned meta_group_size() const { return (thread_block::size() + SIZE - 1) / SIZE; }
    static constexpr unsigned size() { return SIZE; }
    static constexpr unsigned num_threads() { return SIZE; }

    unsigned mask() const {  // lanes of its warp
        return (0xffffffffu >> (32 - SIZE)) << (cuda_on_cpu::lane() / SIZE * SIZE);
    }

    void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
        cuda_on_cpu::exchange(mask(), 0, cuda_on_cpu::lane(), file, line);
    }

    template <typename T>
    T shfl_xor(T value, unsigned lanes, const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
        return cuda_on_cpu::shuffle(mask(), value, cuda_on_cpu::lane() ^ lanes, file, line);
    }
};

template <unsigned SIZE, typename Parent>
thread_block_tile<SIZE, Parent> tiled_partition(const Parent&) {
    return {};
}

}  // namespace cooperative_groups
