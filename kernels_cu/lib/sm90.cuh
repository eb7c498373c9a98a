// PTX instructions of Hopper that the kernels use, each wrapped in a small function. They need sm_90a and PTX 8.6 (CUDA
// 12.8) or newer. The matrix products are in lib/sm90_wgmma.cuh.
//
//   mbarrier   a word in shared memory at which threads and copies arrive and other threads wait; its phases are
//              numbered 0, 1, 0 ...
//   TMA        the Tensor Memory Accelerator: one thread requests the copy of a box (a block of a tensor) between
//              global and shared memory. A tensor map (gpt2block/cuda/tensor_maps.py) holds the tensor's shape and
//              layout. Elements outside the tensor are read as zeros and are not written
//   cluster    blocks on neighbouring SMs, which can write to each other's shared memory (lib/cluster.cuh)
#pragma once

#include "lib/cluster.cuh"
#include "lib/overlap.cuh"

struct alignas(64) TensorMap {  // CUtensorMap
    unsigned char opaque[128];
};

struct alignas(8) Barrier {
    unsigned long long state;
};

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Returns true in exactly one lane of a warp, the same lane in every call. All lanes must be active.
__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}

// Tells the compiler that `value` is the same in all lanes of a warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---- mbarriers

__device__ __forceinline__ void init(Barrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to TMA. Call this function after init().
__device__ __forceinline__ void fence_inits() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives at the barrier with the same address in block `block` of the cluster. This arrival orders memory accesses
// only within this block. The other block may then overwrite data, so the caller's reads of that data must be complete;
// reads by products are complete after wait_for_products(). With release at cluster scope, the arrival would wait for
// all writes of the thread, including writes to global memory, and products took 1.4 times as long. With a release
// fence for shared memory alone, products took up to 1.8 % longer.
__device__ __forceinline__ void arrive_at(Barrier& barrier, int block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(&barrier)),
        "r"(block)
        : "memory");
}

// Arrives at the barrier. The barrier's phase then ends only after copies of `bytes` bytes have arrived as well.
__device__ __forceinline__ void arrive_and_expect(Barrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
}

template <bool FROM_OTHERS>  // with FROM_OTHERS, no acquire is needed here: wait() contains a fence
__device__ __forceinline__ bool phase_ended(const Barrier& barrier, unsigned phase) {
    unsigned ended;
    if constexpr (FROM_OTHERS) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(ended)
            : "r"(shared_address(&barrier)), "r"(phase)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(ended)
            : "r"(shared_address(&barrier)), "r"(phase)
            : "memory");
    }
    return ended;
}

// Waits until phase `phase` (0 or 1) of the barrier has ended. It must be the current phase or the previous phase. With
// FROM_OTHERS, data that other blocks of the cluster have written to this block's shared memory (by copies or
// store_at()) is then also visible. The fence for FROM_OTHERS compiles to no instruction, whereas
// try_wait.acquire.cluster would invalidate the L1 cache. With -DSPIN_LIMIT=n, the kernel reports the barrier after n
// attempts and stops.
template <bool FROM_OTHERS = false>
__device__ __forceinline__ void wait(const Barrier& barrier, unsigned phase, const char* name) {
#ifdef SPIN_LIMIT
    for (long long tries = 0; !phase_ended<FROM_OTHERS>(barrier, phase); ++tries) {
        if (tries == SPIN_LIMIT) {
            printf("block %d, thread %d: %s, phase %u, never ended\n", blockIdx.x, threadIdx.x, name, phase);
            __trap();
        }
    }
#else
    while (!phase_ended<FROM_OTHERS>(barrier, phase)) {
    }
#endif
    if (FROM_OTHERS) asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}

// ---- TMA

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Waits for the previous kernel like wait_for_previous(). For threads that then request copies from or to arrays which
// earlier kernels have accessed by ordinary loads and stores. TMA accesses memory by another path (the
// async proxy): without the fence, its copies are not ordered after these accesses.
__device__ __forceinline__ void wait_before_copies() {
    wait_for_previous();
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Requests the load of a box of an array of matrices, starting at column x, row y and matrix z. The bytes of the box
// arrive at the barrier.
__device__ __forceinline__ void load_box(void* to, const TensorMap& map, Barrier& barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Requests a copy of `bytes` bytes (a multiple of 16) from global to shared memory. The bytes arrive at the barrier.
__device__ __forceinline__ void load_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}

// Multicast version of load_bytes(): every block of the cluster whose bit is set in `blocks` receives the bytes at the
// same address in its shared memory, and the bytes arrive at the barrier of this block.
__device__ __forceinline__ void load_bytes_for(unsigned short blocks, void* to, const void* from, int bytes,
                                               Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier)), "h"(blocks)
        : "memory");
}

// Multicast version of load_box: every block of the cluster whose bit is set in `blocks` receives the box at the same
// address in its shared memory, and the bytes arrive at the barrier of this block.
__device__ __forceinline__ void load_box_for(unsigned short blocks, void* to, const TensorMap& map, Barrier& barrier,
                                             int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Closes a group of stores by TMA: all stores that this thread has issued since its last call of
// end_stores().
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until TMA has read the shared memory of this thread's groups of stores, except the LATER most
// recent groups.
template <int LATER>
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LATER) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and to wgmma. Call this function before the
// barrier after which another thread issues the copy or the product.
__device__ __forceinline__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- threads, registers, clusters

// Synchronises some warps of a block at named barrier `id` (1 to 15). threads: number of threads in these warps.
__device__ __forceinline__ void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at named barrier `id` without waiting. The threads that call sync_threads(id, threads) wait for this arrival.
__device__ __forceinline__ void pass_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Synchronises threads like sync_threads(), and returns whether `yes` is true in any of them.
__device__ __forceinline__ bool any_of_threads(int id, int threads, bool yes) {
    unsigned any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"((unsigned)yes)
        : "memory");
    return any;
}

// Sets the number of registers per thread of a warpgroup, a multiple of 8: take_registers increases it, give_registers
// decreases it.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Stores four floats in the shared memory of block `block` of the cluster, at the address that corresponds to `here`.
// The 16 bytes arrive at the barrier of that block that corresponds to `barrier`.
__device__ __forceinline__ void store_at(int block, void* here, Barrier& barrier, float a, float b, float c, float d) {
    asm volatile(
        "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [bar];\n}" ::"r"(
            shared_address(here)),
        "r"(shared_address(&barrier)), "r"(block), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}

__device__ __forceinline__ void store_at(int block, void* here, Barrier& barrier, float a, float b) {  // 2 floats
    asm volatile(
        "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [bar];\n}" ::"r"(
            shared_address(here)),
        "r"(shared_address(&barrier)), "r"(block), "f"(a), "f"(b)
        : "memory");
}

// ---- shared memory

// Returns the swizzled offset of a 16-byte unit in a box, in the layout of TMA and wgmma. SWIZZLE is 7, 3
// or 1 for rows of 128, 64 or 32 bytes. The unit's index in its 128-byte line is XORed with the line number (masked by
// SWIZZLE), so that accesses to a column of 8 rows or to a whole row have no bank conflicts. Offsets are relative to an
// address aligned to 1024 bytes. With SWIZZLE 7:
//
//   position in a line   0 1 2 3 4 5 6 7
//   unit, line 1         1 0 3 2 5 4 7 6
//   unit, line 2         2 3 0 1 6 7 4 5
template <int SWIZZLE = 7>
__device__ __forceinline__ int swizzled(int offset) {
    return offset ^ ((offset >> 7 & SWIZZLE) << 4);
}

// Stores four 8x8 matrices of 16-bit values in shared memory. Lane 8 i + r passes the address of row r of matrix i,
// aligned to 16 bytes. Lane 4 g + t (t = 0..3) holds columns 2t and 2t + 1 of row g of each matrix.
__device__ __forceinline__ void store_matrices(int row, unsigned m0, unsigned m1, unsigned m2, unsigned m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// Loads four 8x8 matrices from shared memory, in the layout of store_matrices.
__device__ __forceinline__ void load_matrices(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                 : "r"(row)
                 : "memory");
}

// Stores, or loads, four 8x8 matrices that are transposed in shared memory: lane 4 g + t (t = 0..3) holds rows 2t and
// 2t + 1 of column g of each matrix.
__device__ __forceinline__ void store_transposed(int row, unsigned m0, unsigned m1, unsigned m2, unsigned m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                 : "r"(row)
                 : "memory");
}
