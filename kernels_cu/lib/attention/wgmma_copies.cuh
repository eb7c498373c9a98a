// Loads of Q, K and V into the shared memory of attention/prompt/wgmma.cu and attention/prompt/wgmma_alternate.cu. The
// TMA loads them, except K and V of an FP8 kv_cache, which the threads of the copying warps load and
// widen. Included by lib/attention/wgmma_rows.cuh.
#pragma once

// Sources of the rows of Q, K and V. With ATT_CACHED, `k` and `v` are the arrays of the kv_cache. TMA reads
// these arrays through k_map and v_map, unless they are FP8: then threads read them.
struct Source {
    const TensorMap &map, &k_map, &v_map;
    const KV *k, *v;
};

// The address of position 0 in V (or in K of a kv_cache) for the tile's head, and the distance `stride` between
// positions in elements.
struct Values {
    const KV* first;
    long long stride;

    // `from`: the array qkv, or with ATT_CACHED the array v or k of the kv_cache.
    __device__ __forceinline__ Values(const Work& work, const KV* from) {
        const int C = SIZE * work.n_head, own = C / ATT_SERVES;
        const long long row = CACHED ? (long long)work.map_z * work.n_ctx : work.row;
        stride = CACHED ? own : C + 2 * own;
        first = from + row * stride + (CACHED ? 0 : C + own) + SIZE * (work.head / ATT_SERVES);
    }
};

// Converts eight FP8 numbers to T.
__device__ __forceinline__ uint4 widen_eight(unsigned low, unsigned high) {
    uint4 found{0, 0, 0, 0};
#if ATT_CACHED && (defined(CACHE_E5M2) || defined(CACHE_E4M3))
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = KV::halves(i < 2 ? low : high, i % 2 * 2);
#if defined(STORAGE_BF16)
        pairs[i] = pack2(widen_half(pairs[i]), widen_half(pairs[i] >> 16));
#endif
    }
    found = {pairs[0], pairs[1], pairs[2], pairs[3]};
#endif
    return found;
}

// 128 rows of K or V in FP8, in registers of all threads of the copying warps. Only the first `there` rows are read;
// the other rows are zeros.
struct Narrow {
    static constexpr int UNITS = SIZE / 16, ROWS = GROUP / UNITS;  // 16-byte units per row; rows loaded at once
    uint4 bytes[KEYS / ROWS];

    __device__ __forceinline__ Narrow(const KV* from, long long stride, int there) {
        from += threadIdx.x % UNITS * 16;
#pragma unroll
        for (int i = 0; i < KEYS / ROWS; ++i) {
            const int row = threadIdx.x % GROUP / UNITS + i * ROWS;
            bytes[i] = row < there ? __ldcg(reinterpret_cast<const uint4*>(from + row * stride)) : uint4{0, 0, 0, 0};
        }
    }

    // Converts the rows to T, stores them in shared memory, and arrives at the barrier.
    __device__ __forceinline__ void widen_to(char* to, Barrier& barrier) const {
        const int unit = threadIdx.x % UNITS, row = threadIdx.x % GROUP / UNITS;
        to += unit / 4 * BOX;
#pragma unroll
        for (int i = 0; i < KEYS / ROWS; ++i) {
            const int at = swizzled((row + i * ROWS) * LINE + unit % 4 * 32);
            *reinterpret_cast<uint4*>(to + at) = widen_eight(bytes[i].x, bytes[i].y);
            *reinterpret_cast<uint4*>(to + (at ^ 16)) = widen_eight(bytes[i].z, bytes[i].w);
        }
        show_writes();
        arrive(barrier);
    }
};

// Loads 128 rows of Q (`part` 0), K (1) or V (2) for the tile's head, from position `first` of the tile's sequence on.
__device__ __forceinline__ void load_rows(const Source& from, const Work& work, char* to, Barrier& barrier, int part,
                                          int first) {
    if (WIDENS && threadIdx.x % GROUP) return;
    const bool cached = CACHED && part;
    const int C = SIZE * work.n_head, start = part && !cached ? C + (part - 1) * C / ATT_SERVES : 0;
    const int column = start + SIZE * (part ? work.head / ATT_SERVES : work.head);
    const int row = cached ? first : work.map_row + first, z = CACHED && !part ? 0 : work.map_z;
    const TensorMap& map = !cached ? from.map : part == 1 ? from.k_map : from.v_map;
    arrive_and_expect(barrier, SLOT);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) load_box(to + box * BOX, map, barrier, column + 64 * box, row, z);
}

// Loads 128 rows of K (`part` 1) or V (2), for step `step` of the tile, into a slot of a ring buffer. Waits first until
// the slot is empty (a slot that was never used is empty). FP8 rows are read into registers before the wait for the
// slot.
__device__ __forceinline__ void load_slot(const Source& from, const Work& work, Shared& shared, int ring,
                                          unsigned number, int part, int step) {
    const int slot = number % SLOTS;
    char* const to = shared.slots[ring][slot];
    Barrier &full = shared.full[ring][slot], &empty = shared.empty[ring][slot];
    if constexpr (WIDENS) {
        const Values rows(work, part == 1 ? from.k : from.v);
        const int first = (first_step(work) + step) * KEYS;
        const Narrow bytes(rows.first + first * rows.stride, rows.stride, work.n_ctx - first);
        wait(empty, number / SLOTS + 1 & 1, "empty");
        bytes.widen_to(to, full);
    } else {
        wait(empty, number / SLOTS + 1 & 1, "empty");
        load_rows(from, work, to, full, part, (first_step(work) + step) * KEYS);
    }
}
