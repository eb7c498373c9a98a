// The start of a block of the wgmma attention kernels, and infinite and NaN values in a slot of a ring in shared
// memory. The including file defines GROUP (threads per warpgroup) and SLOT (bytes per slot).
#pragma once

// Initialises the barriers and returns the block's shared memory.
template <typename Memory>
__device__ __forceinline__ Memory& start_block(const TensorMap& map) {
    extern __shared__ char unaligned[];
    Memory& shared = *reinterpret_cast<Memory*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    let_next_start();
    if (threadIdx.x == 0) {
        prefetch(map);
        shared.start();
    }
    __syncthreads();
    wait_before_copies();
    return shared;
}

// Returns whether all values in a slot are finite. All threads of a warpgroup must call this function, with the same
// barrier.
__device__ __forceinline__ bool all_finite(const char* slot, int barrier) {
    unsigned found = 0;
    const uint4* units = reinterpret_cast<const uint4*>(slot) + threadIdx.x % GROUP;
#pragma unroll
    for (int i = 0; i < SLOT / 16; i += GROUP) {
        const uint4 unit = units[i];
        found |= not_finite(unit.x) | not_finite(unit.y) | not_finite(unit.z) | not_finite(unit.w);
    }
    return !any_of_threads(barrier, GROUP, found != 0);
}

// Replaces infinite and NaN values in a slot by 0. COUNT threads must call this function, then use a barrier.
template <int COUNT>
__device__ __forceinline__ void remove_not_finite(char* slot) {
    unsigned* pairs = reinterpret_cast<unsigned*>(slot);
    for (int i = threadIdx.x % COUNT; i < SLOT / 4; i += COUNT) pairs[i] = finite_of(pairs[i]);
    show_writes();
}
