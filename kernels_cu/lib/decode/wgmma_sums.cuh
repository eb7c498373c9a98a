// The sums of a tile of outputs over all splits of K, for products of decoding by wgmma: computed in one block, or
// exchanged within a cluster. Included by lib/decode/wgmma_tile.cuh.
#pragma once
#include "lib/decode/wgmma.cuh"

constexpr int OWN = (WARPS * TILES + DH_SPLITS - 1) / DH_SPLITS;  // tiles that a block finishes
constexpr int OF_WARP = (TILES + DH_SPLITS - 1) / DH_SPLITS;      // most tiles that one of its warps finishes
constexpr int AHEAD = OF_WARP < 4 ? OF_WARP : 4;                  // tiles that a warp finishes at a time
// With TERM_COUNT 1, columns of B are rows of x, and a lane has the sums of rows 2t and 2t + 1 of each eight rows.
// IN_PAIRS: it writes them as 16 bytes to the places of two lanes, unless these rows are in tiles that different blocks
// finish.
constexpr bool IN_PAIRS = TERM_COUNT == 1 && (DH_SPLITS == 1 || TILES == 1);
constexpr int FOUND = IN_PAIRS ? TERMS / 2 : 2 * TILES;  // sums of a lane, in the order in which it writes them
// For GGUF weights: whether a block has one or both halves of the splits, and keeps the sums of each half in shared
// memory.
constexpr bool IN_HALVES = order::BLOCKS && DH_SPLITS <= 2;
constexpr bool OF_HALVES = IN_HALVES && DH_SPLITS == 2;  // whether blocks exchange sums of halves, not of splits

// Returns the number of sums that a block receives for each tile. With OF_HALVES it receives one: the sum of its own
// half stays in its shared memory.
__device__ __forceinline__ int messages(int splits) { return OF_HALVES ? 1 : splits; }

static_assert(order::BLOCKS || DH_SPLITS > 1 || TILES <= 8 * DH_STAGES, "W of a warp has room for its sums");
static_assert(WARPS * TILES >= DH_SPLITS, "every block finishes a tile");

// The sums of a lane's two rows of A over all splits, for all tiles of 4 rows of x that its warp has. The blocks of a
// cluster exchange the sums of their splits through shared memory, as pairs of floats (messages(), OWN tiles, 32
// lanes): block i % DH_SPLITS receives the sums of tile i and adds them. A block without a cluster keeps its sums in
// the memory of the warp's rows of W, once the warp has multiplied all of them. With GGUF weights and one or two blocks
// per tile (IN_HALVES), blocks lack registers: they add the splits of each half in shared memory. Two blocks then
// exchange the sums of the tiles that the other block finishes.
struct Totals {
    const Ring& ring;
    float2* pairs;
    Barrier& arrived;
    int part, warp;
    float2* halves;  // sums of halves of the splits, with IN_HALVES

    static constexpr int PLACES = DH_DEPTH > 1 ? 1 + order::HALF_SPLITS / 2 : 2;  // halves, or parts of one half
    static constexpr int HALF = TWO ? 1024 : 2048, BYTES = 32 * sizeof(float2);  // bytes: W of a warp in a row; a tile
    static constexpr int IN_STAGE = 2048 / BYTES;                                // tiles per stage

    __device__ __forceinline__ float2* kept(int tile, int lane) const {
        if (IN_HALVES) return halves + (warp * (TERMS / 4) + tile) * 32 + lane;
        const int at = tile % IN_STAGE * BYTES;
        char* const of_warp = ring.stage(tile / IN_STAGE) + HALF * warp;
        return reinterpret_cast<float2*>(of_warp + (at < HALF ? at : W_BYTES / 2 + at - HALF)) + lane;
    }

    // Keeps the lane's sums over all splits in shared memory.
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

    // Returns the lane's place in shared memory for sums i to i + 3 of half `half` of the splits, with IN_HALVES.
    __device__ __forceinline__ float4& of_half(int half, int i) const {
        return reinterpret_cast<float4*>(halves)[((half * WARPS + warp) * (TERMS / 8) + i / 4) * 32 + threadIdx.x % 32];
    }

    // Adds the sums of a split to the sums of its half. first: whether this is the first split of the half.
    __device__ __forceinline__ void add(const float (&sums)[TERMS / 2], int half, bool first) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = first ? float4{} : of_half(half, i);
            v.x += sums[i], v.y += sums[i + 1], v.z += sums[i + 2], v.w += sums[i + 3];
            of_half(half, i) = v;
        }
    }

    // Adds up the block's halves, or the `count` parts of one half. Afterwards their places can be used again.
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

    // Sends the sums of one split, or of a half of the splits, to the blocks that finish the tiles.
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

    // Loads the sums of tiles first, first + DH_SPLITS, ..., added over all splits.
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
        constexpr int AT_ONCE = order::HALF_SPLITS;  // received sums of a half, which are added first
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

// Exchanges the second value of a lane with the first value of the lane DISTANCE further.
template <int DISTANCE>
__device__ __forceinline__ void swap(float& first, float& second) {
    const bool further = threadIdx.x & DISTANCE;
    const float received = __shfl_xor_sync(0xffffffffu, further ? first : second, DISTANCE);
    (further ? first : second) = received;
}

// Regroups a lane's sums of rows g and g + 8 of A by tiles of 4 rows of x: found has row t of each tile or, with
// IN_PAIRS, two neighbouring rows. With TERM_COUNT 1 and tiles that different blocks finish, lanes first exchange sums.
// Without this exchange a warp would send 32 messages, of 8 bytes per lane to one of two blocks: qkv of GPT-2 small
// with 64 rows would take 12.3 us, not 5.4.
__device__ __forceinline__ void by_tile(const float (&sums)[TERMS / 2], float (&found)[FOUND]) {
    if constexpr (TERM_COUNT == 2) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[2 * i] + sums[2 * i + 1];
    } else if constexpr (IN_PAIRS) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
    } else {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {  // sums of rows g of two tiles, then of rows g + 8
            float first = sums[2 * i], second = sums[2 * i + 1];
            swap<1>(first, second);
            swap<2>(first, second);
            found[i / 2 * 4 + i % 2] = first, found[i / 2 * 4 + 2 + i % 2] = second;
        }
    }
}
