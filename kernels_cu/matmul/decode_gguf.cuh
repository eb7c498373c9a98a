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

    // Adds a unit of a split to its sums.
    __device__ __forceinline__ void use(int slot, int split, int unit, const Input& input, Sums& sums) const {
        if (SPLITS * LENGTH > LM_K && (split * UNITS + unit) * order::UNIT >= LM_K) return;
        use_tile(ring + slot * SLOT, split, unit, input, sums);
    }

   private:
    __device__ __forceinline__ static void use_tile(const W* from, int split, int unit, const Input& input,
                                                    Sums& sums) {
        float d[2], of_minimum[2], by[UNIT_CHUNKS][2][2];  // of columns g and g + 8; by: of a chunk, first and second
        unsigned least[4] = {};
        order::Columns columns[UNIT_CHUNKS];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Part part;
            const W* const lows = from + i * OCTET_BYTES;
            const W* const highs = lows + Part::LOW_BYTES;
            part.load(lows, highs, highs + Part::HIGH_BYTES, split * UNITS + unit, threadIdx.x % 32 / 4);
            const typename Part::Own own = part.own(split * UNITS + unit);
            d[i] = own.d, of_minimum[i] = own.minimum, least[i] = own.least;
#pragma unroll
            for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
                unsigned pairs[4];
                part.codes(chunk, Part::INTEGERS ? gguf::of_lane(own.by, chunk) : 0u, pairs);
                gguf::place(pairs, i, columns[chunk].value);
                if (!Part::INTEGERS) by[chunk][i][0] = gguf::of_lane(own.first, chunk);
                if (Part::HALVES) by[chunk][i][1] = gguf::of_lane(own.second, chunk);
            }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
            float (&to)[4] = sums.of[0][r];
            float half[2][4] = {}, minimum[4] = {};  // of INTEGERS, chunks 0 and 1, and 2 and 3
#pragma unroll
            for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
                order::Rows x;
                input.get(x, r, split, unit, chunk);
                float part[2][4] = {};
                float (&first)[4] = Part::INTEGERS ? half[chunk / 2] : part[0];
                float (&second)[4] = Part::INTEGERS ? half[chunk / 2] : part[Part::HALVES];
                mma_fp16(first, columns[chunk].value[0], x.value[0]);
                mma_fp16(second, columns[chunk].value[1], x.value[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!Part::INTEGERS) to[i] = fmaf(by[chunk][i / 2][0], part[0][i], to[i]);
                    if (Part::HALVES) to[i] = fmaf(by[chunk][i / 2][1], part[1][i], to[i]);
                }
            }
            if (Part::MINIMUM) {  // lane t has m and the sums of x of chunk t
                const unsigned of_x[2] = {input.chunk_sums(r, split, unit), 0u};
                mma_fp16(minimum, least, of_x);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (Part::INTEGERS) to[i] = fmaf(d[i / 2], half[0][i] + half[1][i], to[i]);
                if (Part::MINIMUM) to[i] = fmaf(of_minimum[i / 2], minimum[i], to[i]);
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
        blocks.use(from, split, unit, input, sums);
        from = from + 1 == LM_FLIGHT ? 0 : from + 1;
    }
};
static_assert(LM_FLIGHT >= 2, "a unit is requested before it is used");
