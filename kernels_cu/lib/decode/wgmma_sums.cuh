// The sums of a tile of outputs over all splits (ranges) of K, for decoding with wgmma. One block computes them, or the
// blocks of a cluster divide the splits and exchange their sums. Included by lib/decode/wgmma_tile.cuh.
#pragma once
#include "lib/decode/wgmma.cuh"

constexpr int OWN = (FINISHERS * TILES + DECODE_SPLITS - 1) / DECODE_SPLITS;  // 4-row tiles that a block completes
constexpr int OF_WARP = (TILES + DECODE_SPLITS - 1) / DECODE_SPLITS;  // maximum of 4-row tiles that a warp completes
constexpr int AHEAD = OF_WARP < 4 ? OF_WARP : 4;                  // 4-row tiles that a warp completes at a time
// With OPERAND_TERMS 1, columns of B are rows of x, and lane 4 g + t has the sums of rows 2t and 2t + 1 of each eight
// rows. IN_PAIRS: the lane writes the sums of both rows as 16 bytes, to the memory of two lanes. This requires that one
// block finishes the tiles of both rows.
constexpr bool IN_PAIRS = OPERAND_TERMS == 1 && (DECODE_SPLITS == 1 || TILES == 1);
constexpr int FOUND = IN_PAIRS ? TERMS / 2 : 2 * TILES;  // number of sums that a lane writes per split
// For GGUF weights: true if a block computes one or both halves of the splits (ranges of K). The block then keeps the
// sums over each half in shared memory.
constexpr bool IN_HALVES = order::BLOCKS && DECODE_SPLITS <= 2;
constexpr bool OF_HALVES = IN_HALVES && DECODE_SPLITS == 2;  // true: blocks exchange sums over half of the splits

// Returns the number of sums that a block receives for each output of its tiles. With OF_HALVES it receives one sum;
// the sum over the half that it has computed itself is already in its shared memory.
__device__ __forceinline__ int messages(int splits) { return OF_HALVES ? 1 : splits; }

static_assert(order::BLOCKS || DECODE_SPLITS > 1 || TILES <= 8 * DECODE_STAGES, "W of a warp has room for its sums");
static_assert(FINISHERS * TILES >= DECODE_SPLITS, "every block finishes a tile");

// The sums of a lane's two rows of A over all splits, for all of its warp's tiles of 4 rows of x. The blocks of a
// cluster exchange the sums of their splits through shared memory, as pairs of floats (messages(), OWN tiles, 32
// lanes): block i % DECODE_SPLITS receives the sums of tile i and adds them. Without a cluster, a warp stores its sums
// in the shared memory of its rows of W, after it has multiplied all of W. With GGUF weights and one or two blocks per
// tile (IN_HALVES), registers do not suffice: the sums over each half of the splits are added in shared memory. Two
// blocks then exchange the sums of the tiles that the other block finishes.
struct Totals {
    const Ring& ring;
    float2* pairs;
    Barrier& arrived;
    int part, warp;  // warp: index among the FINISHERS
    float2* halves;  // with IN_HALVES: sums over halves of the splits

    static constexpr int PLACES = DECODE_DEPTH > 1 ? 1 + order::HALF_SPLITS / 2 : 2;  // partial sums in `halves`
    static constexpr int HALF = TWO ? 1024 : 2048, BYTES = 32 * sizeof(float2);  // bytes: warp's rows of W; tile's sums
    static constexpr int IN_STAGE = 2048 / BYTES;                                // tiles of sums per stage

    // Returns the place of a lane's two sums of a tile: in `halves`, or in the stages of the ring.
    __device__ __forceinline__ float2* kept(int tile, int lane) const {
        if (IN_HALVES) return halves + (warp * (TERMS / 4) + tile) * 32 + lane;
        const int at = tile % IN_STAGE * BYTES;
        char* const of_warp = ring.stage(tile / IN_STAGE) + HALF * warp;
        return reinterpret_cast<float2*>(of_warp + (at < HALF ? at : W_BYTES / 2 + at - HALF)) + lane;
    }

    // Stores the lane's sums over all splits (ranges of K) in shared memory.
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

    // With IN_HALVES: returns the shared memory for the lane's sums i to i + 3 over half `half` of the splits.
    __device__ __forceinline__ float4& of_half(int half, int i) const {
        return reinterpret_cast<float4*>(halves)[((half * WARPS + warp) * (TERMS / 8) + i / 4) * 32 + threadIdx.x % 32];
    }

    // Adds the sums over a split to the sums over half `half` of the splits. first: whether the split is the half's
    // first one.
    __device__ __forceinline__ void add(const float (&sums)[TERMS / 2], int half, bool first) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = first ? float4{} : of_half(half, i);
            v.x += sums[i], v.y += sums[i + 1], v.z += sums[i + 2], v.w += sums[i + 3];
            of_half(half, i) = v;
        }
    }

    // Adds up the `count` partial sums in `halves`: the sums over both halves, or partial sums over one half.
    // Afterwards their shared memory can be overwritten.
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

    // Sends the sums over one split (range of K), or over half of the splits, to the blocks that complete the tiles.
    __device__ __forceinline__ void send(int split, const float (&found)[FOUND]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int i = warp * TILES + tile, rank = i % DECODE_SPLITS, block = rank * DECODE_SHARES + part;
            if (OF_HALVES && rank == split) continue;  // kept
            float2* to = pairs + ((OF_HALVES ? 0 : split) * OWN + i / DECODE_SPLITS) * 32 + lane;
            if constexpr (!IN_PAIRS) store_at(block, to, arrived, found[2 * tile], found[2 * tile + 1]);
            else if (t < 2) store_at(block, to + t, arrived, found[0], found[1], found[2], found[3]);
        }
    }

    // Loads the sums of AHEAD tiles (`first`, `first` + DECODE_SPLITS, ...) and adds each tile's sums over all splits.
    __device__ __forceinline__ void get(float2 (&totals)[AHEAD], int first, int splits) const {
        const int own = (warp * TILES + first) / DECODE_SPLITS, lane = threadIdx.x % 32;
        if (DECODE_SPLITS == 1 || OF_HALVES) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                totals[i] = *kept(first + i * DECODE_SPLITS, lane);
                if (!OF_HALVES) continue;
                const float2 more = pairs[(own + i) * 32 + lane];
                totals[i].x += more.x, totals[i].y += more.y;
            }
            return;
        }
        constexpr int AT_ONCE = order::HALF_SPLITS;  // sums per half of the splits, which is added up first
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

// Exchanges `second` of each lane whose bit DISTANCE is 0 with `first` of the lane DISTANCE later.
template <int DISTANCE>
__device__ __forceinline__ void swap(float& first, float& second) {
    const bool further = threadIdx.x & DISTANCE;
    const float received = __shfl_xor_sync(0xffffffffu, further ? first : second, DISTANCE);
    (further ? first : second) = received;
}

// Regroups the sums of lane 4 g + t, for rows g and g + 8 of A, by tiles of 4 rows of x: `found` has the sums of row t
// of each tile or, with IN_PAIRS, of two neighbouring rows. With OPERAND_TERMS 1 and tiles that different blocks
// finish, lanes first exchange sums. Without this exchange, a warp would send 32 messages of 8 bytes per lane, each to
// one of two blocks, and the product would take more than twice as long (docs/experiments.md#decode_wgmma).
__device__ __forceinline__ void by_tile(const float (&sums)[TERMS / 2], float (&found)[FOUND]) {
    if constexpr (OPERAND_TERMS == 2) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[2 * i] + sums[2 * i + 1];
    } else if constexpr (IN_PAIRS) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
    } else {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {  // found: row g of A for two tiles, then row g + 8 of A
            float first = sums[2 * i], second = sums[2 * i + 1];
            swap<1>(first, second);
            swap<2>(first, second);
            found[i / 2 * 4 + i % 2] = first, found[i / 2 * 4 + 2 + i % 2] = second;
        }
    }
}
