// The sums of a tile of the products of decoding by wgmma, of its splits: from one block, or exchanged in a cluster.
// Included by lib/decode/wgmma_tile.cuh.
#pragma once
#include "lib/decode/wgmma.cuh"

constexpr int OWN = (WARPS * TILES + DH_SPLITS - 1) / DH_SPLITS;  // tiles that a block finishes
constexpr int OF_WARP = (TILES + DH_SPLITS - 1) / DH_SPLITS;      // and a warp of it, at most
constexpr int AHEAD = OF_WARP < 4 ? OF_WARP : 4;                  // at a time
// With TERM_COUNT 1, columns of B are rows, and a lane has sums of rows 2t and 2t + 1 of each eight. It writes them to
// the places of two lanes, 16 bytes, unless these are in tiles for different blocks.
constexpr bool IN_PAIRS = TERM_COUNT == 1 && (DH_SPLITS == 1 || TILES == 1);
constexpr int FOUND = IN_PAIRS ? TERMS / 2 : 2 * TILES;  // sums of a lane, in the order in which it writes them
// Blocks of GGUF: whether a block has one half of the splits, or both, and keeps sums of halves in shared memory.
constexpr bool IN_HALVES = order::BLOCKS && DH_SPLITS <= 2;
constexpr bool OF_HALVES = IN_HALVES && DH_SPLITS == 2;  // whether those are exchanged, instead of sums of splits

// Sums of a tile that a block receives. Its own one of a half stays where it was added up.
__device__ __forceinline__ int messages(int splits) { return OF_HALVES ? 1 : splits; }

static_assert(order::BLOCKS || DH_SPLITS > 1 || TILES <= 8 * DH_STAGES, "W of a warp has room for its sums");
static_assert(WARPS * TILES >= DH_SPLITS, "every block finishes a tile");

// The sums of a lane's two rows of A, for all tiles of 4 rows of its warp. Those of the splits of a cluster's blocks
// are exchanged: (messages, OWN, 32) pairs in shared memory. Tile i is for block i % DH_SPLITS, which adds them. Those
// of a block alone are kept where the warp's rows of W were, once it has multiplied all of them. Of blocks of GGUF, one
// or two blocks keep the sums of a half of the splits while they add it up: they have no registers for that. What two
// blocks then exchange is what the other one finishes.
struct Totals {
    const Ring& ring;
    float2* pairs;
    Barrier& arrived;
    int part, warp;
    float2* halves;  // with IN_HALVES

    static constexpr int PLACES = DH_DEPTH > 1 ? 1 + order::HALF_SPLITS / 2 : 2;  // of halves, or of parts of one
    static constexpr int HALF = TWO ? 1024 : 2048, BYTES = 32 * sizeof(float2);  // of the warp in W, and of a tile
    static constexpr int IN_STAGE = 2048 / BYTES;                                // tiles

    __device__ __forceinline__ float2* kept(int tile, int lane) const {
        if (IN_HALVES) return halves + (warp * (TERMS / 4) + tile) * 32 + lane;
        const int at = tile % IN_STAGE * BYTES;
        char* const of_warp = ring.stage(tile / IN_STAGE) + HALF * warp;
        return reinterpret_cast<float2*>(of_warp + (at < HALF ? at : W_BYTES / 2 + at - HALF)) + lane;
    }

    // Keeps the sums of all splits.
    __device__ __forceinline__ void keep(const float (&found)[FOUND]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
        if constexpr (IN_PAIRS) {
#pragma unroll
            for (int i = 0; i < FOUND; i += 4) {
                const int tile = i / 2 + t / 2;
                const float4 two = {found[i], found[i + 1], found[i + 2], found[i + 3]};
                if (tile < TILES) *reinterpret_cast<float4*>(kept(tile, lane - t + t % 2 * 2)) = two;
            }
            __syncwarp();
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) *kept(tile, lane) = {found[2 * tile], found[2 * tile + 1]};
        }
    }

    // With IN_HALVES: a lane's own place for four sums of a half.
    __device__ __forceinline__ float4& of_half(int half, int i) const {
        return reinterpret_cast<float4*>(halves)[((half * WARPS + warp) * (TERMS / 8) + i / 4) * 32 + threadIdx.x % 32];
    }

    // Adds the sums of a split to those of its half. first: of the half.
    __device__ __forceinline__ void add(const float (&sums)[TERMS / 2], int half, bool first) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = first ? float4{} : of_half(half, i);
            v.x += sums[i], v.y += sums[i + 1], v.z += sums[i + 2], v.w += sums[i + 3];
            of_half(half, i) = v;
        }
    }

    // The sums of the halves that the block has, or of `count` parts of one, whose places can be used again.
    __device__ __forceinline__ void get_halves(float (&sums)[TERMS / 2], int count) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = of_half(0, i);
#pragma unroll
            for (int place = 1; place < PLACES; ++place) {
                if (place >= count) break;
                const float4 more = of_half(place, i);
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
            sums[i] = v.x, sums[i + 1] = v.y, sums[i + 2] = v.z, sums[i + 3] = v.w;
        }
        __syncwarp();
    }

    // Sends those of a split, or of a half of them.
    __device__ __forceinline__ void send(int split, const float (&found)[FOUND]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int i = warp * TILES + tile, rank = i % DH_SPLITS, block = rank * DH_SHARES + part;
            if (OF_HALVES && rank == split) continue;  // kept
            float2* to = pairs + ((OF_HALVES ? 0 : split) * OWN + i / DH_SPLITS) * 32 + lane;
            if constexpr (!IN_PAIRS) store_at(block, to, arrived, found[2 * tile], found[2 * tile + 1]);
            else if (t < 2) store_at(block, to + t, arrived, found[0], found[1], found[2], found[3]);
        }
    }

    // Those of tiles first, first + DH_SPLITS, ...
    __device__ __forceinline__ void get(float2 (&totals)[AHEAD], int first, int splits) const {
        const int own = (warp * TILES + first) / DH_SPLITS, lane = threadIdx.x % 32;
        if (DH_SPLITS == 1 || OF_HALVES) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                totals[i] = *kept(first + i * DH_SPLITS, lane);
                if (!OF_HALVES) continue;
                const float2 more = pairs[(own + i) * 32 + lane];
                totals[i].x += more.x, totals[i].y += more.y;
            }
            return;
        }
        constexpr int AT_ONCE = order::HALF_SPLITS;  // messages that are added to each other first
        const int count = messages(splits);
#pragma unroll 1
        for (int message = 0; message < count;) {
            float2 sums[AHEAD];
            const int begin = message, end = min(begin + AT_ONCE, count);
#pragma unroll 1
            for (; message < end; ++message) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const float2 more = pairs[(message * OWN + min(own + i, OWN - 1)) * 32 + lane];
                    sums[i].x = message > begin ? sums[i].x + more.x : more.x;
                    sums[i].y = message > begin ? sums[i].y + more.y : more.y;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                totals[i].x = begin ? totals[i].x + sums[i].x : sums[i].x;
                totals[i].y = begin ? totals[i].y + sums[i].y : sums[i].y;
            }
        }
    }
};

// Of two values, the second one of a lane and the first one of the lane DISTANCE further change places.
template <int DISTANCE>
__device__ __forceinline__ void swap(float& first, float& second) {
    const bool further = threadIdx.x & DISTANCE;
    const float received = __shfl_xor_sync(0xffffffffu, further ? first : second, DISTANCE);
    (further ? first : second) = received;
}

// A lane's sums of rows g and g + 8 of A: of row t of x of each tile of 4 or, IN_PAIRS, of two neighbouring rows. With
// TERM_COUNT 1 and tiles for different blocks, lanes exchange them: were one to send what it has, 8 bytes of a lane to
// one of two blocks would be 32 messages for a warp, and qkv of GPT-2 small take 12.3 us with 64 rows, not 5.4.
__device__ __forceinline__ void by_tile(const float (&sums)[TERMS / 2], float (&found)[FOUND]) {
    if constexpr (TERM_COUNT == 2) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[2 * i] + sums[2 * i + 1];
    } else if constexpr (IN_PAIRS) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
    } else {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {  // of rows g of two tiles, then of rows g + 8
            float first = sums[2 * i], second = sums[2 * i + 1];
            swap<1>(first, second);
            swap<2>(first, second);
            found[i / 2 * 4 + i % 2] = first, found[i / 2 * 4 + 2 + i % 2] = second;
        }
    }
}
