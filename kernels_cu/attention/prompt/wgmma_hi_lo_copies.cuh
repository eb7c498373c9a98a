// Constants, shared memory and copies of attention/prompt/wgmma_hi_lo.cu, which describes them. The including file
// includes lib/attention/hi_lo_rows.cuh.
#pragma once

#include "lib/sm90.cuh"

constexpr int KEYS = 64, QUERIES = 64;  // keys per tile; queries per block
constexpr int SLOTS = 4;                // slots per ring; each warpgroup has a ring
#include "lib/attention/wgmma_work.cuh"

constexpr int GROUP = 128, CONSUMERS = 2 * GROUP, THREADS = CONSUMERS + GROUP, WARPS = GROUP / 32;
constexpr int LINE = 2 * SIZE, PART = KEYS * LINE, SLOT = 2 * PART;  // LINE: bytes per row; PART: bytes of hi or lo
constexpr int PASSED = 4 * COLUMNS + 6;  // floats that each thread of the second warpgroup passes to the first
static_assert(SIZE == 64, "a row of a head is a line of a box, and the sums fit into registers");
static_assert(SLOTS >= 4, "K and V of one tile are multiplied while those of the next one travel");
#include "lib/attention/wgmma_slots.cuh"

// The ring of a warpgroup. A slot holds K or V of a tile. Slots are filled with K of the first tile; then, for each
// further tile, with its K and the V of the tile before it; at last with V of the last tile.
struct Ring {
    char slots[SLOTS][SLOT];
};

struct Shared {
    Ring rings[2];
    char queries[2][SLOT];
    float passed[PASSED][GROUP];
    Barrier full[2][SLOTS], empty[2][SLOTS];
    Barrier asked[2], answered[2];  // asked: queries have arrived; answered: queries have been read

    __device__ __forceinline__ void start() {  // called by one thread
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < SLOTS; ++j) init(full[i][j], 1), init(empty[i][j], WARPS);
            init(asked[i], 1), init(answered[i], CONSUMERS / 32);
        }
        fence_inits();
    }
};

// Named barriers for the threads of one consumer warpgroup or of both.
enum { CHECK = 1, TURN = CHECK + 2, PASS = TURN + 2, TAKEN };

// first_tile: the first tile of keys that a block's queries see. tiles_of: the number of tiles that they see.
__device__ __forceinline__ int first_tile(const Work& work) { return first_seen(work.first) / KEYS; }
__device__ __forceinline__ int tiles_of(const Work& work) {
    return ((ATT_CAUSAL ? min(work.length, work.first + QUERIES) : work.length) - 1) / KEYS + 1 - first_tile(work);
}

__device__ __forceinline__ void produce(Shared& shared, const TensorMap& map, Work work) {
    const auto load = [&](int group, unsigned number, int column, int row) {
        wait(shared.empty[group][number % SLOTS], number / SLOTS + 1 & 1, "empty");  // new slots count as empty
        char* const to = shared.rings[group].slots[number % SLOTS];
        Barrier& full = shared.full[group][number % SLOTS];
        arrive_and_expect(full, SLOT);
        for (int part = 0; part < 2; ++part) load_box(to + part * PART, map, full, column, row, part);
    };
    unsigned slots = 0, others = 0;  // slots filled so far: `slots` in the first ring, `others` in the second
    for (int tile = 0; work.next(); ++tile) {
        int heads = work.n_head;
        asm volatile("" : "+r"(heads));  // the compiler must not hold values derived from `heads` in registers
        const int tiles = tiles_of(work), row = (int)work.row, column = SIZE * (heads + work.head / ATT_SERVES);
        const int values = column + SIZE * (heads / ATT_SERVES);
        wait(shared.answered[tile % 2], tile / 2 + 1 & 1, "answered");
        arrive_and_expect(shared.asked[tile % 2], SLOT);
        for (int part = 0; part < 2; ++part) {
            char* const to = shared.queries[tile % 2] + part * PART;
            load_box(to, map, shared.asked[tile % 2], SIZE * work.head, row + work.first, part);
        }
#pragma unroll 1
        for (int i = 0; i < tiles + 2; ++i) {  // i counts tiles backwards: loads keys of tile i, values of tile i - 2
            const unsigned own = (i % 2 > 0 ? others : slots) + i / 2 * 2;
            const int first = row + (first_tile(work) + tiles - 1 - i) * KEYS;
            if (i < tiles) load(i % 2, own - (i >= 2), column, first);
            if (i >= 2) load(i % 2, own - (i >= tiles), values, first + 2 * KEYS);
        }
        slots += (tiles + 1) / 2 * 2, others += tiles / 2 * 2;
    }
}
