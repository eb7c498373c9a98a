// The loop of lib/decode/wgmma.cuh over K where W is in blocks of GGUF: its rings, the warp that requests
// stages, and the warps that multiply.
//
// A stage of x is a unit of 128 of K: two boxes, and the sums of its chunks (lib/chunk_sums.cuh). W has a ring of its
// own, of tiles of 128 or 256 of K: one copy for each eight rows. With three copies for each unit, of low bits, high
// bits and scales, the copy engine was the bound: 12,288 x 4,096 with 16 rows took 23.4 us.
//
// A lane unpacks codes of two rows, as A, while the products of the chunk before are under way: of Q4_K and Q5_K with
// s, for one sum of a block of 256, of others for one of a sub-block. Sums begin at 0 and are added to those of the
// split with a scale, so that they have the bits of lib/decode/mma_gguf.cuh. For minimums a warp has an mma of eight
// rows of x, with the sums.
//
// NVIDIA H100, Q4_K, us in a graph with gguf_chunk_sums, which takes 1.7 to 4.1 of them (before, with sums of 64 of K,
// and blocks of one warpgroup; now three for 64 rows where an output has many columns):
//
//   rows   12,288 x 4,096    4,096 x 4,096    4,096 x 11,008    2 x 11,008 x 4,096
//   16     18.9  (20.2)      11.8  (12.6)     21.5  (23.7)      31.4  (37.3)
//   64     27.9  (36.2)      15.4  (18.0)     30.0  (37.3)      42.9  (62.3)
//
// Predicted: 200 instructions of a warp for a unit of 64 rows in place of 492, and half of the time. There are 257,
// with 16 rows 230 in place of 365. Of 27.9 us, 12.8 are the same for any K: chunk sums, the start, the first copies,
// the exchange and the epilogue. In the loop three warps of a scheduler issue 0.4 a cycle: a quarter of their time they
// wait for copies, an eighth for a unit of arithmetic. Hence the ring of W is as deep as that of x where there is room,
// and where a multiprocessor needs one block, it has room for no other, not even for one of the next kernel: a step of
// 64 rows of Llama 7B in Q4_K_M takes 9.13 ms in place of 9.62, one of 9 rows 3.42 in place of 3.60.
// Nothing hides the latencies of such a block's four warps. With two sets of warps, each with rings of its own, which
// share its half of K (DH_DEPTH 2), 4,096 x 11,008 takes 26.0 us for 64 rows in place of 29.9, 4,096 x 4,096 14.2 in
// place of 15.4, and that step 9.03 ms; with a cache of E5M2 6.53 in place of 6.70 (predicted: 6.27).
#pragma once

#ifndef DH_TILES  // places in the ring of W
#define DH_TILES 2
#endif

constexpr int ROW_OCTETS = 8 * DH_GROUPS;  // of a block; where an output has two rows, the second half are second ones
constexpr int SUMS_AT = X_BYTES;           // in a stage

// What a block multiplies with x. sums: of the chunks of x; none where no type has minimums.
struct Sources {
    const W* w;
    const W* up;
    const float* sums;
};

// Requests all stages and tiles; called by one warp. A lane requests eight rows of W, the last one x.
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
    const int each = TWO ? ROW_OCTETS / 2 : ROW_OCTETS, there = min(each, (max(0, N - share.column) + 7) / 8);
    const bool own = lane < ROW_OCTETS && lane % each < there;
    const int row = first_row(share.column + lane % each * 8) + (DH_ROPE && lane >= each ? HALF_HEAD : 0);
    const W* const octet = (DH_GATED && lane >= each ? from.up : from.w) + OfRange::begin(K) +
                           (long long)((row - OfRange::FROM) / gguf::OCTET) * Part::row_bytes(K);
    const int first_tile = begin / Part::UNITS, tiles = (end - 1) / Part::UNITS + 1 - first_tile;
    const auto load_w = [&](int count) {  // in any order: a phase ends with the bytes that lane 0 expects
        const int stage = count % DH_TILES;
        if (lane == 0) arrive_and_expect(ring.tile_full[stage], (TWO ? 2 : 1) * there * Part::BYTES);
        char* const to = ring.tile(stage) + lane * Part::BYTES;
        if (own) load_bytes(to, octet + (first_tile + count) * Part::BYTES, Part::BYTES, ring.tile_full[stage]);
    };
    const long long value = (long long)share.row * K + (long long)share.k * share.rows;
    const char* const of_tile = reinterpret_cast<const char*>(x) + 2 * value;
    const int box = BOX * of_rows, part = box / DH_SHARES, at = share.part * part;
    const unsigned short all = ((1 << DH_SHARES) - 1) << share.rank * DH_SHARES;
    const auto load_x = [&](int unit) {
        if (lane != 31) return;
        const int stage = (unit - begin) % DH_STAGES;
        char* const to = ring.stage(stage);
        arrive_and_expect(ring.full[stage], 2 * box + (Part::MINIMUM ? 16 * share.rows : 0));
        const char* const of_x = of_tile + (long long)(unit - begin) * 2 * box + at;
        const bool whole = DH_SHARES == 1 && box == BOX_BYTES;  // the boxes are neighbours there, too
        for (int i = 0; i < 2; ++i) {
            if (DH_SHARES > 1) load_bytes_for(all, to + i * BOX_BYTES + at, of_x + i * box, part, ring.full[stage]);
            else if (!whole || i == 0) {
                load_bytes(to + i * BOX_BYTES, of_x + i * box, whole ? 2 * box : box, ring.full[stage]);
            }
        }  // whether two boxes are contiguous in both memories
        if (Part::MINIMUM) {
            const float* sum = from.sums + (long long)share.row * (K / 32) + (long long)unit * share.rows * 4;
            load_bytes(to + SUMS_AT, sum, 16 * share.rows, ring.full[stage]);
        }
    };
    for (int tile = 0; tile < min(DH_TILES, tiles); ++tile) load_w(tile);
    if (CLUSTER > 1) wait_for_cluster();  // the barriers of the other blocks are initialised
    wait_before_copies();
    for (int unit = begin; unit < min(begin + DH_STAGES, end); ++unit) load_x(unit);
    // Places in the order in which they become free. One path for all lanes: where those of x and of W were two, each
    // waited for what the other one waited for.
    int tile = 0;
    for (int unit = begin; unit < end; ++unit) {
        const int count = unit - begin, stage = count % DH_STAGES;
        if (unit + DH_STAGES < end || DH_SHARES > 1) {  // with shares also the last: others arrive until then
            wait(ring.empty[stage], count / DH_STAGES & 1, "empty");
            if (unit + DH_STAGES < end) load_x(unit + DH_STAGES);
        }
        if ((unit + 1) % Part::UNITS != 0 || tile + DH_TILES >= tiles) continue;
        wait(ring.tile_empty[tile % DH_TILES], tile / DH_TILES & 1, "empty tile");
        load_w(DH_TILES + tile++);
    }
}

// The row of W, of those of a warp, that lane 4 g + t has as row g of A. Row g + 8 is the next one, or that of the
// second matrix, or with RoPE half a head further.
__device__ __forceinline__ int own_row() { return threadIdx.x % 32 / 4 * (TWO ? 1 : 2); }
constexpr int NEXT_ROW = 4;  // lanes from an even row of W to the next one, with TWO

struct Consumer {
    typedef float Products[TERMS / 2];

    const Ring& ring;
    const int rank;
    int stage = 0, tile = 0;  // the next ones
    unsigned phase = 0, tile_phase = 0;
    const int begin, end;  // units of the block

    __device__ __forceinline__ Consumer(const Ring& ring, const Share& share)
        : ring(ring), rank(share.rank), begin(share.k / order::UNIT), end(begin + share.slices) {}

    // The sums of a split of so many units, from unit `first` of K on. row: the first one of the block.
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
    // All that was loaded has been used, so that no copy into this place can overtake a load. Each lane says so for its
    // own loads: with an arrival of lane 0 after __syncwarp() the time is the same, and racecheck, which does not see
    // that the warp is together, reports the loads of the others.
    __device__ __forceinline__ void release(int used) const {
        if (DH_SHARES == 1) arrive(ring.empty[used]);
#pragma unroll
        for (int i = 0; DH_SHARES > 1 && i < DH_SHARES; ++i) arrive_at(ring.empty[used], rank * DH_SHARES + i);
    }

    // Waits for x of the next unit, whose stage it gives.
    __device__ __forceinline__ int next() {
        const int full = stage;
        wait<(DH_SHARES > 1)>(ring.full[full], phase, "full");
        if (++stage == DH_STAGES) stage = 0, phase ^= 1;
        return full;
    }

    __device__ __forceinline__ void release_tile() {
        arrive(ring.tile_empty[tile]);
        if (++tile == DH_TILES) tile = 0, tile_phase ^= 1;
    }

    // A lane's rows of a unit.
    template <typename Part>
    __device__ __forceinline__ void load(Part (&parts)[2], int unit) const {
        const int warp = own_warp(), row = own_row(), half = unit % Part::UNITS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int octet = TWO ? warp + i * ROW_OCTETS / 2 : 2 * warp + row / 8;
            const W* of = reinterpret_cast<const W*>(ring.tile(tile)) + octet * Part::BYTES;
            parts[i].load(of + Part::low_at(half), of + Part::high_at(half), of + Part::scales_at(0), unit,
                          TWO ? row : row % 8 + i);
        }
    }

    // Of INTEGERS: units of a tile, which have one sum. While a chunk is unpacked, the one before is multiplied.
    template <int RANGE, int COUNT>
    __device__ __forceinline__ void add_tile(Products& sums, int first) {
        typedef typename gguf::OfRange<RANGE>::Of Part;
        Part parts[COUNT][2];
        typename Part::Own own[COUNT][2];
        Products found;
        unsigned codes[2][2][4];           // of chunks, which alternate, two steps each
        unsigned of_x[TERMS / 8][2] = {};  // sums
        int used;
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
                wait_for_products<1>();  // all but those of the chunk before
                if (i > 0 && chunk == 1) load_sums<Part, 0>(of_x, before), release(before);
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
        load(parts[0], first);  // the scales again: they were not kept
        const typename Part::End ends[2] = {parts[0][0].end(), parts[0][1].end()};
        if (COUNT == 2 || first % 2 == 1) load_sums<Part, 1>(of_x, used);
        else load_sums<Part, 0>(of_x, used);
        add_minimums(sums, ends, of_x);
        wait_for_products<0>();
        pin(found);
#pragma unroll
        for (int i = 0; i < TERMS / 2; ++i) sums[i] = fmaf(ends[i % 4 / 2].d, found[i], sums[i]);
        release(used);
    }

    // Of others: a unit, whose sub-blocks have sums of their own.
    template <int RANGE>
    __device__ __forceinline__ void add_unit(Products& sums, int unit) {
        typedef typename gguf::OfRange<RANGE>::Of Part;
        constexpr int PIECES = Part::HALVES ? 8 : 4, EACH = 8 / PIECES;  // EACH: steps of one
        Part parts[2];
        load(parts, unit);
        const typename Part::Own own[2] = {parts[0].own(unit), parts[1].own(unit)};
        const int used = next();
        const Matrix x = matrix_at(ring.stage(used));
        Products found[2];
        unsigned codes[2][2][4];  // of chunks, two steps each
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const int step = piece * EACH;
            if (step % 2 == 0) unpack(parts, own, step / 2, codes[step / 2 % 2]);
            fence_sums();
#pragma unroll
            for (int s = step; s < step + EACH; ++s) {
                const Matrix b = further(x, s / 4 * BOX_BYTES + s % 4 * 32);
                multiply(found[piece % 2], codes[s / 2 % 2][s % 2], b, s > step);
            }
            end_products();
            if (piece > 0) {
                wait_for_products<1>();
                add<Part>(sums, found[(piece - 1) % 2], own, piece - 1);
            }
        }
        wait_for_products<0>();
        add<Part>(sums, found[(PIECES - 1) % 2], own, PIECES - 1);
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            unsigned of_x[TERMS / 8][2] = {};
            load_sums<Part, 0>(of_x, used);
            add_minimums(sums, ends, of_x);
        }
        release(used);
    }

    template <typename Part>
    __device__ __forceinline__ static void unpack(const Part (&parts)[2], const typename Part::Own (&own)[2], int chunk,
                                                  unsigned (&to)[2][4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned pairs[4];
            parts[i].codes(chunk, Part::INTEGERS ? gguf::of_lane(own[i].by, chunk) : 0u, pairs);
            gguf::place(pairs, i, to);
        }
    }

    // Adds the products of a sub-block times its scales.
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

    // The sums of x of chunk t of unit AT of a tile.
    template <typename Part, int AT>
    __device__ __forceinline__ void load_sums(unsigned (&of_x)[TERMS / 8][2], int used) const {
        const unsigned* const from = reinterpret_cast<const unsigned*>(ring.stage(used) + SUMS_AT);
#pragma unroll
        for (int j = 0; Part::MINIMUM && j < TERMS / 8; ++j) of_x[j][AT] = from[32 * j + threadIdx.x % 32];
    }

    // Lane t has m and the sums of x of chunk t of each unit of a tile.
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
