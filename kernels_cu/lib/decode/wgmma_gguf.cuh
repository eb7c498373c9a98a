// The loop over K of lib/decode/wgmma.cuh for GGUF weights W: two ring buffers, the producer warp, which requests their
// contents, and the consumer warps, which multiply.
//
// A stage of the ring of x holds a unit of 128 values of K: two boxes of 64 values, and the sums of x over chunks of 32
// values (lib/chunk_sums.cuh). W has a separate ring of GGUF tiles of 128 or 256 values of K, with one copy per eight
// rows of W. An earlier version had, for every unit of eight rows, three copies: low bits, high bits and scales. TMA,
// TMA, was then the bottleneck.
//
// A lane unpacks the codes of two rows of W, as operand A, while the products of the previous chunk are running. In
// Q4_K and Q5_K, codes are multiplied by the integer scale s, and a sum covers a GGUF block of 256 values; in other
// types, a sum covers a sub-block. Each of these sums begins at 0, is multiplied by a scale and is added to the sum of
// the split (a range of K, lib/decode/order.cuh), so that outputs have the same bits as with lib/decode/mma_gguf.cuh.
// For minimums of W, a warp executes one mma per eight rows of x: it multiplies the minimums by the rows' chunk sums.
//
// Another earlier version had sums over 64 values of K and thread blocks of one warpgroup. Thread blocks now have three
// warpgroups for 64 rows if the matrix has many columns. Per unit, a warp executes 257 instructions instead of 492 for
// 64 rows (predicted: 200), and 230 instead of 365 for 16 rows. Almost half of the time of 12,288 x 4,096 with 64 rows
// does not depend on K: chunk sums, start, first copies, exchange of sums and epilogue. In the loop, the three warps of
// a scheduler together issue 0.4 instructions per cycle. The warps wait a quarter of the time for copies and an eighth
// for an arithmetic unit.
// Therefore the ring of W is as deep as the ring of x if shared memory permits. If there is at most one block per
// multiprocessor, a block requests so much shared memory that no second block fits, not even a block of the next
// kernel.
//
// If such a block has only four consumer warps, no other warps hide their latencies. With DECODE_DEPTH 2, a block
// therefore has two sets of warps with separate rings, which divide the values of K that the block multiplies.
//
// Measured: docs/experiments.md#products-with-blocks-of-gguf
#pragma once

#ifndef DECODE_TILES  // number of GGUF tiles that the ring of W holds
#define DECODE_TILES 2
#endif

constexpr int ROW_GROUPS = 8 * DECODE_GROUPS;  // 8-row groups of W (and U) per block
constexpr int SUMS_AT = X_BYTES;           // offset of the chunk sums in a stage

// Operands of a product besides x. w, up: GGUF weights. sums: sums of x over chunks (lib/chunk_sums.cuh), read only if
// a GGUF type of w has minimums.
struct Sources {
    const W* w;
    const W* up;
    const float* sums;
};

// Requests all stages of x and all tiles of W that the block multiplies; called by one warp. Each lane requests the
// GGUF tiles of eight rows of W; the last lane also requests x.
template <int RANGE = 0>
__device__ __forceinline__ void produce(const Ring& ring, const Share& share, const Sources& from, const float* x,
                                        int N, int K) {
    typedef gguf::OfRange<RANGE> OfRange;
    typedef typename OfRange::Of Part;
    if constexpr (!OfRange::LAST) {
        if (first_row(share.column) >= OfRange::NEXT) return produce<RANGE + 1>(ring, share, from, x, N, K);
    }
    const int lane = threadIdx.x % 32, of_rows = 2 * share.rows;
    const int begin = share.k / order::UNIT, end = begin + share.slices;  // units
    const int each = TWO ? ROW_GROUPS / 2 : ROW_GROUPS, there = min(each, (max(0, N - share.column) + 7) / 8);
    const bool own = lane < ROW_GROUPS && lane % each < there;
    const int row = first_row(share.column + lane % each * 8) + (DECODE_ROPE && lane >= each ? HALF_HEAD : 0);
    const W* const row_group = (DECODE_GATED && lane >= each ? from.up : from.w) + OfRange::begin(K) +
                           (long long)((row - OfRange::FROM) / gguf::ROW_GROUP) * Part::row_bytes(K);
    const int first_tile = begin / Part::UNITS, tiles = (end - 1) / Part::UNITS + 1 - first_tile;
    const auto load_w = [&](int count) {  // in any order of lanes: the phase ends when all bytes have arrived
        const int stage = count % DECODE_TILES;
        if (lane == 0) arrive_and_expect(ring.tile_full[stage], (TWO ? 2 : 1) * there * Part::BYTES);
        char* const to = ring.tile(stage) + lane * Part::BYTES;
        if (own) load_bytes(to, row_group + (first_tile + count) * Part::BYTES, Part::BYTES, ring.tile_full[stage]);
    };
    const long long value = (long long)share.row * K + (long long)share.k * share.rows;
    const char* const of_tile = reinterpret_cast<const char*>(x) + 2 * value;
    const int box = BOX * of_rows, part = box / DECODE_SHARES, at = share.part * part;
    const unsigned short all = ((1 << DECODE_SHARES) - 1) << share.rank * DECODE_SHARES;
    const auto load_x = [&](int unit) {
        if (lane != 31) return;
        const int stage = (unit - begin) % DECODE_STAGES;
        char* const to = ring.stage(stage);
        arrive_and_expect(ring.full[stage], 2 * box + (Part::MINIMUM ? 16 * share.rows : 0));
        const char* const of_x = of_tile + (long long)(unit - begin) * 2 * box + at;
        const bool whole = DECODE_SHARES == 1 && box == BOX_BYTES;  // whether two boxes are contiguous in both memories
        for (int i = 0; i < 2; ++i) {
            if (DECODE_SHARES > 1) load_bytes_for(all, to + i * BOX_BYTES + at, of_x + i * box, part, ring.full[stage]);
            else if (!whole || i == 0) {
                load_bytes(to + i * BOX_BYTES, of_x + i * box, whole ? 2 * box : box, ring.full[stage]);
            }
        }
        if (Part::MINIMUM) {
            const float* sum = from.sums + (long long)share.row * (K / 32) + (long long)unit * share.rows * 4;
            load_bytes(to + SUMS_AT, sum, 16 * share.rows, ring.full[stage]);
        }
    };
    for (int tile = 0; tile < min(DECODE_TILES, tiles); ++tile) load_w(tile);
    if (CLUSTER > 1) wait_for_cluster();  // the barriers of the other blocks are initialised
    wait_before_copies();
    for (int unit = begin; unit < min(begin + DECODE_STAGES, end); ++unit) load_x(unit);
    // Stages of x and tiles of W are requested again in the order in which they become free. All lanes execute the same
    // path: separate branches for x and W would be serialised, and each branch would wait for the other's barriers.
    int tile = 0;
    for (int unit = begin; unit < end; ++unit) {
        const int count = unit - begin, stage = count % DECODE_STAGES;
        if (unit + DECODE_STAGES < end || DECODE_SHARES > 1) {  // also wait for other blocks' last arrivals
            wait(ring.empty[stage], count / DECODE_STAGES & 1, "empty");
            if (unit + DECODE_STAGES < end) load_x(unit + DECODE_STAGES);
        }
        if ((unit + 1) % Part::UNITS != 0 || tile + DECODE_TILES >= tiles) continue;
        wait(ring.tile_empty[tile % DECODE_TILES], tile / DECODE_TILES & 1, "empty tile");
        load_w(DECODE_TILES + tile++);
    }
}

// Returns the row of W, among the rows of this warp, that lane 4 g + t has as row g of A. The lane's row g + 8 of A is
// the next row of W; with DECODE_GATED, the same row of U; with RoPE, the row of W half a head later.
__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4 * (TWO ? 1 : 2); }
constexpr int NEXT_ROW = 4;  // with TWO: distance of the lanes that hold rows 2 i and 2 i + 1 of W

struct Consumer {
    typedef float Products[TERMS / 2];

    const Ring& ring;
    const int rank;
    int stage = 0, tile = 0;  // index of the next stage and of the next tile
    unsigned phase = 0, tile_phase = 0;
    const int begin, end;  // units of K of the block: begin .. end - 1

    __device__ __forceinline__ Consumer(const Ring& ring, const Share& share)
        : ring(ring), rank(share.rank), begin(share.k / order::UNIT), end(begin + share.slices) {}

    // Computes the sums of a split (range of K) that has `units` units of 128 values, from unit `first` on. row: first
    // row of W of the block.
    template <int RANGE = 0>
    __device__ __forceinline__ void multiply_split(Products& sums, int first, int units, int row) {
        typedef gguf::OfRange<RANGE> OfRange;
        if constexpr (!OfRange::LAST) {
            if (row >= OfRange::NEXT) return multiply_split<RANGE + 1>(sums, first, units, row);
        }
        constexpr int OF_TILE = OfRange::Of::UNITS;
        const int last = first + units;
#pragma unroll
        for (int i = 0; i < TERMS / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
        for (int unit = first; unit < last;) {
            if (unit == begin || unit % OF_TILE == 0) wait(ring.tile_full[tile], tile_phase, "full tile");
            if constexpr (!OfRange::Of::INTEGERS) add_unit<RANGE>(sums, unit), unit += 1;
            else if (unit % OF_TILE == 0 && unit + 1 < last) add_tile<RANGE, 2>(sums, unit), unit += 2;
            else add_tile<RANGE, 1>(sums, unit), unit += 1;
            if (unit == end || unit % OF_TILE == 0) release_tile();
        }
    }

   private:
    // Marks stage `used` as empty. The caller must have used, not only loaded, all data of the stage: otherwise a copy
    // into this stage can overtake a load. Such copies overtook loads of chunk sums in Q4_K (H200, 16 and 32 rows of
    // Llama 7B), when the first loads of attention blocks that had started early on the same SM delayed the loads from
    // shared memory. The compiler can also move the use of a sum after the arrival, as it did in Q4_1 and Q5_1.
    // Therefore each caller adds to `used` the 0 that load_sums() returns: the address of the arrival is then known
    // only after the loads. Each lane arrives for its own loads. An arrival of lane 0 after __syncwarp() takes the same
    // time, but racecheck does not see this synchronisation of the warp and reports the loads of the other lanes.
    __device__ __forceinline__ void release(int used) const {
        if (DECODE_SHARES == 1) arrive(ring.empty[used]);
#pragma unroll
        for (int i = 0; DECODE_SHARES > 1 && i < DECODE_SHARES; ++i) {
            arrive_at(ring.empty[used], rank * DECODE_SHARES + i);
        }
    }

    // Waits until x of the next unit (128 values of K) has arrived, and returns the index of the stage that holds it.
    __device__ __forceinline__ int next() {
        const int full = stage;
        wait<(DECODE_SHARES > 1)>(ring.full[full], phase, "full");
        if (++stage == DECODE_STAGES) stage = 0, phase ^= 1;
        return full;
    }

    __device__ __forceinline__ void release_tile() {
        arrive(ring.tile_empty[tile]);
        if (++tile == DECODE_TILES) tile = 0, tile_phase ^= 1;
    }

    // Loads the lane's weights of one unit (128 values of K), from the lane's two rows of W.
    template <typename Part>
    __device__ __forceinline__ void load(Part (&parts)[2], int unit) const {
        const int warp = own_warp(), row = own_row(), half = unit % Part::UNITS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row_group = TWO ? warp + i * ROW_GROUPS / 2 : 2 * warp + row / 8;
            const W* of = reinterpret_cast<const W*>(ring.tile(tile)) + row_group * Part::BYTES;
            parts[i].load(of + Part::low_at(half), of + Part::high_at(half), of + Part::scales_at(0), unit,
                          TWO ? row : row % 8 + i);
        }
    }

    // For types with INTEGERS (lib/gguf.cuh): adds to `sums` the products of COUNT units (128 values of K each) of a
    // GGUF tile. While one chunk of 32 values is unpacked, the previous chunk is multiplied.
    template <int RANGE, int COUNT>
    __device__ __forceinline__ void add_tile(Products& sums, int first) {
        typedef typename gguf::OfRange<RANGE>::Of Part;
        Part parts[COUNT][2];
        typename Part::Own own[COUNT][2];
        Products found;
        unsigned codes[2][2][4];           // [chunk % 2][wgmma step][register]
        unsigned of_x[TERMS / 8][2] = {};  // sums of x over chunks
        int used, free = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            load(parts[i], COUNT == 1 ? first : i);
            own[i][0] = parts[i][0].own(COUNT == 1 ? first : i), own[i][1] = parts[i][1].own(COUNT == 1 ? first : i);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int before = used;
            used = next();
            const Matrix x = matrix_at(ring.stage(used));
#pragma unroll
            for (int chunk = 0; chunk < 4; ++chunk) {
                wait_for_products<1>();  // products of chunk - 2, which used the same registers, are complete
                if (i > 0 && chunk == 0) free = before + load_sums<Part, 0>(of_x, before);
                if (i > 0 && chunk == 1) release(free);
                unpack(parts[i], own[i], chunk, codes[chunk % 2]);
                fence_sums();
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const Matrix b = further(x, chunk / 2 * BOX_BYTES + (chunk % 2 * 2 + s) * 32);
                    multiply(found, codes[chunk % 2][s], b, i > 0 || chunk > 0 || s > 0);
                }
                end_products();
            }
        }
        load(parts[0], first);  // load the scales again: no registers were free to keep them
        const typename Part::End ends[2] = {parts[0][0].end(), parts[0][1].end()};
        if (COUNT == 2 || first % 2 == 1) free = used + load_sums<Part, 1>(of_x, used);
        else free = used + load_sums<Part, 0>(of_x, used);
        add_minimums(sums, ends, of_x);
        wait_for_products<0>();
        pin(found);
#pragma unroll
        for (int i = 0; i < TERMS / 2; ++i) sums[i] = fmaf(ends[i % 4 / 2].d, found[i], sums[i]);
        release(free);
    }

    // For types without INTEGERS: adds the products of a unit (128 values of K), whose sub-blocks have separate sums,
    // to `sums`. With WHOLE, the unit has one sum.
    template <int RANGE>
    __device__ __forceinline__ void add_unit(Products& sums, int unit) {
        typedef typename gguf::OfRange<RANGE>::Of Part;
        constexpr int PIECES = Part::HALVES ? 8 : 4, EACH = 8 / PIECES;  // EACH: wgmma steps per sub-block
        Part parts[2];
        load(parts, unit);
        const typename Part::Own own[2] = {parts[0].own(unit), parts[1].own(unit)};
        const int used = next();
        const Matrix x = matrix_at(ring.stage(used));
        Products found[2];
        unsigned codes[2][2][4];  // [chunk % 2][wgmma step][register]
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int step = piece * EACH;
            if (step % 2 == 0) {
                if (Part::WHOLE) wait_for_products<1>();  // products of chunk - 2, which used the same registers
                unpack(parts, own, step / 2, codes[step / 2 % 2]);
            }
            fence_sums();
#pragma unroll
            for (int s = step; s < step + EACH; ++s) {
                const Matrix b = further(x, s / 4 * BOX_BYTES + s % 4 * 32);
                multiply(found[Part::WHOLE ? 0 : piece % 2], codes[s / 2 % 2][s % 2], b, s > (Part::WHOLE ? 0 : step));
            }
            end_products();
            if (!Part::WHOLE && piece > 0) {
                wait_for_products<1>();
                add<Part>(sums, found[(piece - 1) % 2], own, piece - 1);
            }
        }
        wait_for_products<0>();
        add<Part>(sums, found[Part::WHOLE ? 0 : (PIECES - 1) % 2], own, PIECES - 1);
        int free = used;
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            unsigned of_x[TERMS / 8][2] = {};
            free += load_sums<Part, 0>(of_x, used);
            add_minimums(sums, ends, of_x);
        }
        release(free);
    }

    template <typename Part>
    __device__ __forceinline__ static void unpack(const Part (&parts)[2], const typename Part::Own (&own)[2], int chunk,
                                                  unsigned (&to)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned pairs[4];
            parts[i].codes(chunk, Part::by_of(own[i], chunk), pairs);
            gguf::place(pairs, i, to);
        }
    }

    // Adds `found`, the sums of products of sub-block `piece` of a unit (128 values of K), to `sums`, multiplied by the
    // sub-block's scales.
    template <typename Part>
    __device__ __forceinline__ static void add(Products& sums, Products& found, const typename Part::Own (&own)[2],
                                               int piece) {
        constexpr int OF_CHUNK = Part::HALVES ? 2 : 1;
        pin(found);
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            by[i] = gguf::of_lane(piece % OF_CHUNK ? own[i].second : own[i].first, piece / OF_CHUNK);
        }
#pragma unroll
        for (int i = 0; i < TERMS / 2; ++i) sums[i] = fmaf(by[i % 4 / 2], found[i], sums[i]);
    }

    // Lane 4 g + t loads the sums of all rows of x over chunk t (32 values) of a unit. AT: index of the unit in its
    // GGUF tile. Returns 0, computed from the loaded sums. The compiler cannot simplify this 0: it does not know that
    // end >= 0, because K is an argument of the kernel. An address to which this 0 was added is known only when the
    // loads are complete.
    template <typename Part, int AT>
    __device__ __forceinline__ int load_sums(unsigned (&of_x)[TERMS / 8][2], int used) const {
        const unsigned* const from = reinterpret_cast<const unsigned*>(ring.stage(used) + SUMS_AT);
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; Part::MINIMUM && j < TERMS / 8; ++j) bits |= of_x[j][AT] = from[32 * j + threadIdx.x % 32];
        return (int)(bits & (unsigned)end >> 31);
    }

    // Adds the products of minimums and chunk sums of x to `sums`. Lane 4 g + t has the minimum m and the sum of x for
    // chunk t of each unit of a GGUF tile.
    template <typename End>
    __device__ __forceinline__ static void add_minimums(Products& sums, const End (&ends)[2],
                                                        const unsigned (&of_x)[TERMS / 8][2]) {
        constexpr int LAST = sizeof(ends[0].least) / 4 - 1;
        const unsigned least[4] = {ends[0].least[0], ends[1].least[0], LAST ? ends[0].least[LAST] : 0u,
                                   LAST ? ends[1].least[LAST] : 0u};
#pragma unroll
        for (int j = 0; j < TERMS / 8; ++j) {
            float minimum[4] = {};
            mma_fp16(minimum, least, of_x[j]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * j + i] = fmaf(ends[i / 2].minimum, minimum[i], sums[4 * j + i]);
        }
    }
};
