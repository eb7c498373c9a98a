// The most used part of CUDA's cooperative groups: blocks, tiles of at most a warp, and coalesced threads. The loader
// puts the kernel file and its includes into an unnamed namespace, so this header must not include other headers.
#pragma once

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cooperative_groups_on_cpu {

static unsigned arrived, phases;  // threads that have arrived at the barrier of the block, and its completed phases
static const bool begins = cuda_on_cpu::each_block_first([] { arrived = phases = 0; });

}  // namespace cooperative_groups_on_cpu

namespace cooperative_groups {

class thread_block {
public:
    struct arrival_token {
        unsigned phase;
    };

    static unsigned thread_rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
    static void sync(CALL_SITE) { cuda_on_cpu::barrier(file, line); }

    // A barrier whose wait is separate from the arrival.
    static arrival_token barrier_arrive() {
        using namespace cooperative_groups_on_cpu;
        cuda_on_cpu::fence(false);
        cuda_on_cpu::atomic(&phases, sizeof phases);
        const arrival_token token = {cuda_on_cpu::modified(&phases, [](unsigned old) { return old; })};
        const unsigned last = size() - 1;
        if (cuda_on_cpu::modified(&arrived, [&](unsigned old) { return old == last ? 0 : old + 1; }) == last) {
            cuda_on_cpu::modified(&phases, [](unsigned old) { return old + 1; });
        }
        return token;
    }
    static void barrier_wait(const arrival_token& token) {
        using namespace cooperative_groups_on_cpu;
        for (;; cuda_on_cpu::sleep()) {
            cuda_on_cpu::atomic_read(&phases, sizeof phases);
            if (cuda_on_cpu::modified(&phases, [](unsigned old) { return old; }) != token.phase) return;
        }
    }
};

inline thread_block this_thread_block() { return {}; }

// The grid. Its barrier is an error: it needs a cooperative launch, and the emulator runs blocks one after the other.
class grid_group {
public:
    static bool is_valid() { return false; }
    static void sync(CALL_SITE) {
        const char* what = "grid.sync(): the barrier of a grid needs a cooperative launch, which --mine does not make";
        cuda_on_cpu::stop(what, file, line);
    }
    static unsigned long long num_blocks() { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
    static unsigned long long block_rank() {
        return blockIdx.x + gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    }
    static dim3 group_dim() { return gridDim; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static unsigned long long thread_rank() {
        return block_rank() * thread_block::size() + thread_block::thread_rank();
    }
    static unsigned long long size() { return num_blocks() * thread_block::size(); }
    static unsigned long long num_threads() { return size(); }
};

inline grid_group this_grid() { return {}; }

// Base of groups of lanes in a warp. Self must define mask(), and lane_of(rank), the lane of a rank.
template <typename Self>
class lanes {
    const Self& self() const { return static_cast<const Self&>(*this); }

    unsigned ranks(unsigned lanes) const {  // converts a mask of lanes to a mask of ranks
        unsigned found = 0;
        for (unsigned rank = 0; rank < self().size(); ++rank) found |= (lanes >> self().lane_of(rank) & 1) << rank;
        return found;
    }

public:
    void sync(CALL_SITE) const { cuda_on_cpu::gather(self().mask(), 0, file, line); }

    template <typename T>
    T shfl(T value, unsigned rank, CALL_SITE) const {
        const unsigned lane = self().lane_of(rank % self().size());
        if constexpr (sizeof(T) <= 8) {
            return cuda_on_cpu::shuffle(self().mask(), value, lane, file, line);
        } else {
            unsigned long long words[(sizeof(T) + 7) / 8] = {};
            std::memcpy(words, &value, sizeof value);
            for (auto& word : words) {
                word = cuda_on_cpu::bits<std::uint64_t>(shfl(__longlong_as_double(word), rank, file, line));
            }
            std::memcpy(&value, words, sizeof value);
            return value;
        }
    }

    template <typename T>
    T shfl_up(T value, unsigned delta, CALL_SITE) const {
        const unsigned rank = self().thread_rank();
        return shfl(value, rank < delta ? rank : rank - delta, file, line);
    }

    template <typename T>
    T shfl_down(T value, unsigned delta, CALL_SITE) const {
        const unsigned rank = self().thread_rank();
        return shfl(value, rank + delta < self().size() ? rank + delta : rank, file, line);
    }

    template <typename T>
    T shfl_xor(T value, unsigned lanes, CALL_SITE) const {
        return shfl(value, self().thread_rank() ^ lanes, file, line);
    }

    unsigned ballot(int predicate, CALL_SITE) const {
        return ranks(__ballot_sync(self().mask(), predicate, file, line));
    }
    template <typename T>
    unsigned match_any(T value, CALL_SITE) const {
        return ranks(__match_any_sync(self().mask(), value, file, line));
    }
    template <typename T>
    unsigned match_all(T value, int& all, CALL_SITE) const {
        return ranks(__match_all_sync(self().mask(), value, &all, file, line));
    }
    int any(int predicate, CALL_SITE) const { return __any_sync(self().mask(), predicate, file, line); }
    int all(int predicate, CALL_SITE) const { return __all_sync(self().mask(), predicate, file, line); }
};

template <unsigned SIZE, typename Parent = thread_block>
class thread_block_tile : public lanes<thread_block_tile<SIZE, Parent>> {
    static_assert((SIZE & (SIZE - 1)) == 0, "a tile is a power of two of threads");
    static_assert(SIZE <= 32, "the emulator has no tiles of more than 32 threads");

public:
    unsigned thread_rank() const { return cuda_on_cpu::lane() % SIZE; }
    unsigned meta_group_rank() const { return Parent().thread_rank() / SIZE; }
    unsigned meta_group_size() const { return (Parent().size() + SIZE - 1) / SIZE; }
    static constexpr unsigned size() { return SIZE; }
    static constexpr unsigned num_threads() { return SIZE; }
    unsigned lane_of(unsigned rank) const { return cuda_on_cpu::lane() / SIZE * SIZE + rank; }

    unsigned mask() const {  // mask of the tile's lanes in the warp
        return (0xffffffffu >> (32 - SIZE)) << (cuda_on_cpu::lane() / SIZE * SIZE);
    }

    // A tile of another parent, such as thread_block_tile<8> of a tile of 32 threads.
    template <typename Other>
    operator thread_block_tile<SIZE, Other>() const {
        return {};
    }
};

template <unsigned SIZE, typename Parent>
thread_block_tile<SIZE, Parent> tiled_partition(const Parent&) {
    return {};
}

inline thread_block_tile<1> this_thread() { return {}; }

class coalesced_group : public lanes<coalesced_group> {
    unsigned mask_;

public:
    explicit coalesced_group(unsigned mask) : mask_(mask) {}
    unsigned mask() const { return mask_; }
    unsigned size() const { return __popc(mask_); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return __popc(mask_ & ((1u << cuda_on_cpu::lane()) - 1)); }
    unsigned lane_of(unsigned rank) const {
        unsigned rest = mask_;
        while (rank--) rest &= rest - 1;
        return __ffs(rest) - 1;
    }
};

inline coalesced_group coalesced_threads(CALL_SITE) { return coalesced_group(__activemask(file, line)); }

// Divides a group: threads with the same label are in one group.
template <typename Group, typename Label>
coalesced_group labeled_partition(const Group& group, Label label, CALL_SITE) {
    return coalesced_group(__match_any_sync(group.mask(), label, file, line));
}

template <typename Group>
coalesced_group binary_partition(const Group& group, bool predicate, CALL_SITE) {
    const unsigned true_lanes = __ballot_sync(group.mask(), predicate, file, line);
    return coalesced_group(predicate ? true_lanes : group.mask() & ~true_lanes);
}

// A block, or a group of lanes in a warp.
class thread_group {
    unsigned mask_;  // 0: the block

    coalesced_group lanes_() const { return coalesced_group(mask_); }

public:
    thread_group(const thread_block&) : mask_(0) {}
    template <typename Lanes, typename = decltype(&Lanes::mask)>
    thread_group(const Lanes& lanes) : mask_(lanes.mask()) {}
    unsigned size() const { return mask_ ? lanes_().size() : thread_block::size(); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return mask_ ? lanes_().thread_rank() : thread_block::thread_rank(); }
    void sync(CALL_SITE) const { mask_ ? lanes_().sync(file, line) : thread_block::sync(file, line); }
};

// A group of lanes whose size is not known to the compiler.
template <typename Parent>
thread_group tiled_partition(const Parent&, unsigned size) {
    if (size >= 32) size = 32;
    return coalesced_group((0xffffffffu >> (32 - size)) << (cuda_on_cpu::lane() / size * size));
}

template <typename Group>
void sync(const Group& group, CALL_SITE) {
    group.sync(file, line);
}

}  // namespace cooperative_groups

#undef CALL_SITE
