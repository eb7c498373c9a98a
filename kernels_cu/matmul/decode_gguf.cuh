// Weights in blocks of GGUF for matmul/decode_gguf.cu: up to three ranges of outputs, each of a type.
//
//   lib/gguf.cuh             the blocks
//   matmul/decode_order.cuh  the order of the additions
//
// A warp has 16 columns, two octets of rows of w, which are the A of an mma. It copies a unit of 128 of K at a time to
// a ring of its own in shared memory. A lane reads what other lanes have copied, and no load waits in a register:
//
//   copy    unit i + 2 of these columns, or the first units of the next ones    cp.async, of 16 bytes a lane
//   unpack  unit i: four chunks of 32, in 18 instructions a chunk for 4 bits    a lane: 8 weights of a row of a chunk
//   add     chunk by chunk in the tensor cores, for each eight rows of x
//
// Of Q4_K and Q5_K weights are multiplied by s, and d is applied to the sum of a unit. Of others, sub-blocks have sums
// of their own, multiplied by their scales. Minimums take one mma a unit, with the sums of x of its chunks: m of chunk
// t and the two terms of that sum are at t. A lane unpacks the scales of one chunk, and the four that have a row
// exchange them.
//
// NVIDIA H100, 12,288 x 4,096 in Q4_K, one row. Predicted: 42 instructions of a warp for 32 of K of 16 columns, so that
// reading 28 MB takes longer, 9.4 us. Measured: 62, of which addresses and copies are 15; 14.7 us by itself, DRAM at
// 59 % of its rate, 0.61 instructions a cycle of each scheduler; 13.0 us in a graph, of which 3.6 us are the same for
// smaller matrices: x, the first copies, the last sums. Before, when blocks did not go from columns to columns, loads
// waited in registers and minimums were multiplied by x, it was 71 instructions, 18.7 us, 46 % and 0.46.
#pragma once
#include "lib/gguf_ranges.cuh"
#include "matmul/decode_totals.cuh"

static_assert(LM_COLUMNS == 16 && !LM_LOOP, "a warp has a tile of columns");

// The weights of a warp: a ring of LM_FLIGHT units of its columns in shared memory.
template <int RANGE>
struct Blocks {
    typedef gguf::OfRange<RANGE> OfRange;
    typedef typename OfRange::Of Part;
    // Of an octet in the ring: low bits, high bits, scales.
    static constexpr int OCTET_BYTES = OfRange::STORED;
    static constexpr int SLOT = 2 * OCTET_BYTES;

    const W* w;   // of the range
    const W* up;  // the same of the other matrix, with LM_UP
    W* ring;
    const int N;

    __device__ __forceinline__ Blocks(const W* all, const W* all_up, char* ring, int N)
        : w(all + OfRange::begin(LM_K)), up(LM_UP ? all_up + OfRange::begin(LM_K) : nullptr),
          ring(reinterpret_cast<W*>(ring)), N(N) {}

    // The rows of the first and of the second of two octets of the columns from n on, and those that a lane copies high
    // bits and scales of: lanes 0 to 15 of the first ones, the others of the second ones.
    struct Rows {
        const W* of[3];
    };

    __device__ __forceinline__ Rows rows(int n) const {
        Rows found;
#pragma unroll
        for (int octet = 0; octet < 2; ++octet) {
            const int row = Column(n + 8 * octet, N).n - OfRange::FROM;
            found.of[octet] = (LM_UP && octet ? up : w) + (long long)(row / gguf::OCTET) * Part::row_bytes(LM_K);
        }
        found.of[2] = threadIdx.x % 32 < 16 ? found.of[0] : found.of[1];
        return found;
    }

    // Requests a unit.
    __device__ __forceinline__ void fetch(int slot, int unit, const Rows& rows) const {
        if (SPLITS * LENGTH > LM_K && unit * order::UNIT >= LM_K) return;
        const int lane = threadIdx.x % 32, at = lane % 16 * 16, low = Part::low_at(unit) + 16 * lane;
        W* const to = ring + slot * SLOT;
#pragma unroll
        for (int i = 0; i < Part::VECTORS; ++i) {
            copy16(to + 512 * i + 16 * lane, rows.of[0] + low + 512 * i, true);
            copy16(to + OCTET_BYTES + 512 * i + 16 * lane, rows.of[1] + low + 512 * i, true);
        }
        W* const more = to + (lane < 16 ? 0 : OCTET_BYTES) + Part::LOW_BYTES + at;
        if (at < Part::HIGH_BYTES) copy16(more, rows.of[2] + Part::high_at(unit) + at, true);
        if (at < Part::SCALE_BYTES) copy16(more + Part::HIGH_BYTES, rows.of[2] + Part::scales_at(unit) + at, true);
    }

    // Adds a unit of a split to its sums. found: of INTEGERS, the sums of the units of a tile.
    typedef float Found[Part::INTEGERS ? ROW_TILES : 1][4];

    __device__ __forceinline__ void use(int slot, int split, int unit, const Input& input, Sums& sums,
                                        Found& found) const {
        if (SPLITS * LENGTH > LM_K && (split * UNITS + unit) * order::UNIT >= LM_K) return;
        use_unit(ring + slot * SLOT, split, unit, input, sums, found);
    }

   private:
    __device__ __forceinline__ static void use_unit(const W* from, int split, int unit, const Input& input,
                                                    Sums& sums, Found& found) {
        const int of_k = split * UNITS + unit;
        Part parts[2];  // of columns g and g + 8
        typename Part::Own own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const W* const lows = from + i * OCTET_BYTES;
            const W* const highs = lows + Part::LOW_BYTES;
            parts[i].load(lows, highs, highs + Part::HIGH_BYTES, of_k, threadIdx.x % 32 / 4);
            own[i] = parts[i].own(of_k);
        }
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Columns columns;
            float by[2][2];  // of a column, first and second
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned pairs[4];
                parts[i].codes(chunk, Part::INTEGERS ? gguf::of_lane(own[i].by, chunk) : 0u, pairs);
                gguf::place(pairs, i, columns.value);
                if (!Part::INTEGERS) by[i][0] = gguf::of_lane(own[i].first, chunk);
                if (Part::HALVES) by[i][1] = gguf::of_lane(own[i].second, chunk);
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                order::Rows x;
                input.get(x, r, split, unit, chunk);
                float part[2][4] = {};
                float (&first)[4] = Part::INTEGERS ? found[Part::INTEGERS ? r : 0] : part[0];
                float (&second)[4] = Part::INTEGERS ? first : part[Part::HALVES];
                mma_fp16(first, columns.value[0], x.value[0]);
                mma_fp16(second, columns.value[1], x.value[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& to = sums.of[0][r][i];
                    if (!Part::INTEGERS) to = fmaf(by[i / 2][0], part[0][i], to);
                    if (Part::HALVES) to = fmaf(by[i / 2][1], part[1][i], to);
                }
            }
        }
        if (Part::UNITS == 1 || of_k % 2 == 1 || unit + 1 == UNITS) end_tile(parts, split, unit, input, sums, found);
    }

    // Adds what the units of a tile have together, those of the split up to `unit`.
    __device__ __forceinline__ static void end_tile(const Part (&parts)[2], int split, int unit, const Input& input,
                                                    Sums& sums, Found& found) {
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            const unsigned least[4] = {ends[0].least[0], ends[1].least[0], Part::UNITS > 1 ? ends[0].least[Part::UNITS - 1] : 0u,
                                       Part::UNITS > 1 ? ends[1].least[Part::UNITS - 1] : 0u};
            const int first = Part::UNITS > 1 ? unit - (split * UNITS + unit) % 2 : unit;  // unit of the tile, or -1
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {  // lane t has m and the sums of x of chunk t
                float minimum[4] = {};
                unsigned of_x[2] = {};
                if (first >= 0) of_x[0] = input.chunk_sums(r, split, first);
                if (first < unit) of_x[1] = input.chunk_sums(r, split, unit);
                mma_fp16(minimum, least, of_x);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& to = sums.of[0][r][i];
                    to = fmaf(ends[i / 2].minimum, minimum[i], to);
                    if (Part::INTEGERS) {
                        float& of_codes = found[Part::INTEGERS ? r : 0][i];
                        to = fmaf(ends[i / 2].d, of_codes, to), of_codes = 0.0f;
                    }
                }
            }
        }
    }
};

// The units of a warp in their order: COUNT of K from `first` on, for columns n, n + step, ... Each is requested
// LM_FLIGHT - 1 before it is used, also across columns.
template <typename Blocks, int COUNT>
struct Stream {
    const Blocks blocks;
    const int first, step, end;
    typename Blocks::Rows rows;
    typename Blocks::Found found = {};
    int n, unit = 0, to = 0, from = 0;  // the next that is requested, and the slots of that and of the next one used

    __device__ __forceinline__ Stream(const Blocks& blocks, int first, int n, int step, int end)
        : blocks(blocks), first(first), step(step), end(end), rows(blocks.rows(n)), n(n) {
#pragma unroll
        for (int i = 0; i < LM_FLIGHT - 1; ++i) request();
    }

    __device__ __forceinline__ void request() {
        if (n < end) {
            blocks.fetch(to, first + unit, rows);
            if (++unit == COUNT) {
                asm volatile("");  // a branch: else these addresses are computed for every unit
                unit = 0, n += step, rows = blocks.rows(n);
            }
        }
        end_group();
        to = to + 1 == LM_FLIGHT ? 0 : to + 1;
    }

    // Adds the next unit, which is `unit` of a split.
    __device__ __forceinline__ void use(int split, int unit, const Input& input, Sums& sums) {
        wait_for_groups<LM_FLIGHT - 2>();
        __syncwarp();  // all lanes' copies are there, and all have used the slot before
        request();
        blocks.use(from, split, unit, input, sums, found);
        from = from + 1 == LM_FLIGHT ? 0 : from + 1;
    }
};
static_assert(LM_FLIGHT >= 2, "a unit is requested before it is used");
