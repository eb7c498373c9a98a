// How rows of Q, K and V reach the shared memory of attention/hopper.cu and attention/hopper_alternate.cu: by the copy
// engine (TMA), or, if the kv_cache is FP8, K and V by the threads of the copying warps, which widen them. Included by
// attention/hopper_rows.cuh.
#pragma once

// What rows are loaded from. k and v are those of the kv_cache, with ATT_CACHED; by their maps or, of FP8, by threads.
struct Source {
    const TensorMap &map, &k_map, &v_map;
    const KV *k, *v;
};

// V of position 0 for the tile's head, and the distance of the next position.
struct Values {
    const KV* first;
    long long stride;

    // from: qkv, or with ATT_CACHED v of the kv_cache.
    __device__ __forceinline__ Values(const Work& work, const KV* from) {
        const int C = SIZE * work.n_head, own = C / ATT_SERVES;
        const long long row = CACHED ? (long long)work.map_z * work.n_ctx : work.row;
        stride = CACHED ? own : C + 2 * own;
        first = from + row * stride + (CACHED ? 0 : C + own) + SIZE * (work.head / ATT_SERVES);
    }
};

// Eight numbers of T from as many of FP8.
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

// Copies 128 rows of FP8, of which `there` exist, to a slot, as T. Called by all threads of the copying warps.
__device__ __forceinline__ void widen_rows(char* to, Barrier& barrier, const KV* from, long long stride, int there) {
    constexpr int UNITS = SIZE / 16, ROWS = GROUP / UNITS;  // of a row; that the threads copy
    constexpr int AT_ONCE = 4;                              // of these
    const int unit = threadIdx.x % UNITS;
    from += 16 * unit, to += unit / 4 * BOX;
#pragma unroll 1
    for (int first = threadIdx.x % GROUP / UNITS; first < KEYS; first += ROWS * AT_ONCE) {
        uint4 bytes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = first + i * ROWS;
            bytes[i] = row < there ? __ldcg(reinterpret_cast<const uint4*>(from + row * stride)) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = swizzled((first + i * ROWS) * LINE + unit % 4 * 32);
            *reinterpret_cast<uint4*>(to + at) = widen_eight(bytes[i].x, bytes[i].y);
            *reinterpret_cast<uint4*>(to + (at ^ 16)) = widen_eight(bytes[i].z, bytes[i].w);
        }
    }
    show_writes();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Loads 128 rows of the tile's head, from its sequence's position `first` on. part: 0 for Q, 1 for K, 2 for V.
__device__ __forceinline__ void load_rows(const Source& from, const Work& work, char* to, Barrier& barrier, int part,
                                          int first) {
    if (WIDENS && part) {
        const Values rows(work, part == 1 ? from.k : from.v);
        return widen_rows(to, barrier, rows.first + first * rows.stride, rows.stride, work.n_ctx - first);
    }
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
