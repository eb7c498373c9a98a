// Weights in blocks of GGUF for matmul/decode/mma_gguf.cu: up to three ranges of outputs, each of a type.
//
//   lib/gguf.cuh             the blocks
//   lib/decode/order.cuh  the order of the additions
//
// A warp has 16 columns, two octets of rows of w, which are the A of an mma. It copies a unit of 128 of K at a time to
// a ring of its own in shared memory. A lane reads what other lanes have copied, and no load waits in a register:
//
//   copy    unit i + 2 of these columns, or the first units of the next ones    cp.async, of 16 bytes a lane
//   unpack  unit i: four chunks of 32, in 18 instructions a chunk for 4 bits    a lane: 8 weights of a row of a chunk
//   add     chunk by chunk in the tensor cores, for each eight rows of x
//
// Of Q4_K and Q5_K weights are multiplied by s, and d is applied to the sum of a block of 256. Of others, sub-blocks
// have sums of their own, multiplied by their scales. Minimums take one mma a block, or a unit of others, with the sums
// of x of its chunks: m of chunk t and the two terms of that sum are at t. A lane unpacks the scales of one chunk, and
// the four that have a row exchange them.
//
// NVIDIA H200, 12,288 x 4,096 in Q4_K, one row, in a graph. When d was applied to units, each with two sums, and
// addresses were computed again for each copy: 272 instructions of a warp for a unit, 13.0 us. Predicted for one sum of
// a block and addresses that stay: 150 instructions, 9.4 us as memory is read in. Measured: 192, 48 for 32 of K, in
// 10.9 us, of which 3 are the same for smaller matrices; 12.4 us by itself, DRAM at 48 % of its rate, 0.57 instructions
// a cycle of each scheduler, 0.8 in the loop.
#pragma once
#include "lib/gguf_ranges.cuh"
#include "lib/decode/mma_columns.cuh"

static_assert(LM_COLUMNS == 16 && !LM_LOOP, "a warp has a tile of columns");

constexpr int UNROLLED = UNITS % 2 == 0 ? 2 : 1;  // units, where it is known in the code which of a tile they are

// The same number, which the compiler cannot compute again from threadIdx: it would do so at each use.
__device__ __forceinline__ int kept(int v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }

// What a product multiplies: x (M, LM_K).
struct Whole {
    static constexpr int K = LM_K, UNITS = ::UNITS;  // of K, and of a split
    static constexpr bool UP = LM_UP;
    typedef Input Rows;

    __device__ __forceinline__ static int row(int column, int N) { return Column(column, N).n; }  // of w
};

// The weights of a warp: a ring of LM_FLIGHT units of its columns in shared memory. OfRange: their type.
template <typename OfRange, typename Side = Whole>
struct Blocks {
    typedef typename OfRange::Of Part;
    typedef typename Side::Rows Rows;
    static constexpr int K = Side::K, UNITS = Side::UNITS;
    static constexpr bool SHORT = order::splits(K) * UNITS * order::UNIT > K;  // whether the last split can be
    // Of an octet in the ring: low bits, high bits, scales.
    static constexpr int OCTET_BYTES = Part::LOW_BYTES + Part::HIGH_BYTES + Part::SCALE_BYTES;
    static constexpr int SLOT = 2 * OCTET_BYTES;

    const W* w;   // of the range
    const W* up;  // the same of the other matrix, with UP
    W* ring;
    const int N;
    const int to_low, to_more;  // where a lane puts what it copies, in a slot

    __device__ __forceinline__ Blocks(const W* all, const W* all_up, char* ring, int N)
        : w(all + OfRange::begin(K)), up(Side::UP ? all_up + OfRange::begin(K) : nullptr),
          ring(reinterpret_cast<W*>(ring)), N(N), to_low(kept(threadIdx.x % 32 * 16)),
          to_more(kept((threadIdx.x % 32 < 16 ? 0 : OCTET_BYTES) + Part::LOW_BYTES + own_byte())) {}

    // What a lane copies of the next unit: low bits of the first and of the second of two octets; high bits and scales
    // of the first one (lanes 0 to 15) or of the second. Where these are up to 256 bytes, some lanes copy high bits,
    // others scales.
    static constexpr bool AT_ONCE = Part::HIGH_BYTES + Part::SCALE_BYTES <= 256;

    struct Cursor {
        const W* low[2];
        const W* high;
        const W* scales;
    };

    // The number in its tile of unit `first` + `at` of K, where a split begins with `first`: constant if `at` decides.
    __device__ __forceinline__ static int unit_of_tile(int first, int at) {
        return Part::UNITS == 1 ? 0 : (UNITS % 2 == 0 ? at : first + at) % 2;
    }

    __device__ __forceinline__ static int own_byte() { return threadIdx.x % 16 * 16; }
    __device__ __forceinline__ static bool of_scales() { return own_byte() >= Part::HIGH_BYTES; }  // with AT_ONCE

    // That of the columns from n on.
    __device__ __forceinline__ Cursor cursor(int n, int unit) const {
        const auto octet = [&](int i) {
            const int row = Side::row(n + 8 * i, N) - OfRange::FROM;
            return (Side::UP && i ? up : w) + (long long)(row / gguf::OCTET) * Part::row_bytes(K);
        };
        const int low = Part::low_at(unit) + threadIdx.x % 32 * 16;
        const W* const first = octet(0);
        const W* const second = octet(1);
        const W* const own = threadIdx.x % 32 < 16 ? first : second;
        Cursor found = {{first + low, second + low}, nullptr, nullptr};
        found.high = own + Part::high_at(unit) + own_byte(), found.scales = own + Part::scales_at(unit) + own_byte();
        if (AT_ONCE && of_scales()) found.high = found.scales - Part::HIGH_BYTES;
        return found;
    }

    // Requests a unit, to a slot that is so many bytes after the first, and goes on to the next one. half: its number
    // in its tile.
    __device__ __forceinline__ void fetch(int slot, int unit, int half, Cursor& from) const {
        if (SHORT && unit * order::UNIT >= K) return;
        W* const to = ring + slot + to_low;
        W* const more = ring + slot + to_more;
        const auto further = [&](int bytes) { return half == Part::UNITS - 1 ? Part::BYTES - half * bytes : bytes; };
#pragma unroll
        for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
            for (int i = 0; i < 512 * Part::VECTORS; i += 512) {
                copy16(to + octet * OCTET_BYTES + i, from.low[octet] + i, true);
            }
            from.low[octet] += further(Part::LOW_BYTES);
        }
        constexpr int FIRST = Part::HIGH_BYTES + (AT_ONCE ? Part::SCALE_BYTES : 0);
        if (own_byte() < FIRST) copy16(more, from.high, true);
        from.high += further(AT_ONCE && of_scales() ? 0 : Part::HIGH_BYTES);
        if (AT_ONCE) return;
        if (own_byte() < Part::SCALE_BYTES) copy16(more + Part::HIGH_BYTES, from.scales, true);
        from.scales += further(0);
    }

    // Adds a unit of a split to its sums. found: of INTEGERS, the sums of the units of a tile.
    typedef float Found[Part::INTEGERS ? ROW_TILES : 1][4];

    __device__ __forceinline__ void use(int slot, int split, int unit, const Rows& input, Sums& sums,
                                        Found& found) const {
        if (SHORT && (split * UNITS + unit) * order::UNIT >= K) return;
        use_unit(ring + slot, split, unit, input, sums, found);
    }

   private:
    __device__ __forceinline__ static void use_unit(const W* from, int split, int unit, const Rows& input,
                                                    Sums& sums, Found& found) {
        const int half = unit_of_tile(split * UNITS, unit);
        Part parts[2];  // of columns g and g + 8
        typename Part::Own own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const W* const lows = from + i * OCTET_BYTES;
            const W* const highs = lows + Part::LOW_BYTES;
            parts[i].load(lows, highs, highs + Part::HIGH_BYTES, half, threadIdx.x % 32 / 4);
            own[i] = parts[i].own(half);
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
        if (half == Part::UNITS - 1 || unit + 1 == UNITS) end_tile(parts, half, split, unit, input, sums, found);
    }

    // Adds what the units of a tile have together, those of the split up to `unit`, which is number `half` of it.
    __device__ __forceinline__ static void end_tile(const Part (&parts)[2], int half, int split, int unit,
                                                    const Rows& input, Sums& sums, Found& found) {
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            constexpr int LAST = Part::UNITS - 1;
            const unsigned least[4] = {ends[0].least[0], ends[1].least[0], LAST ? ends[0].least[LAST] : 0u,
                                       LAST ? ends[1].least[LAST] : 0u};
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {  // lane t has m and the sums of x of chunk t
                float minimum[4] = {};
                unsigned of_x[2] = {};
                if (unit >= half) of_x[0] = input.chunk_sums(r, split, unit - half);
                if (half > 0) of_x[1] = input.chunk_sums(r, split, unit);
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
    typename Blocks::Cursor next;
    typename Blocks::Found found = {};
    int n, unit = 0, to = 0, from = 0;  // the next that is requested; where that is put, and the next one used is

    __device__ __forceinline__ Stream(const Blocks& blocks, int first, int n, int step, int end)
        : blocks(blocks), first(first), step(step), end(end), next(blocks.cursor(n, first)), n(n) {
#pragma unroll
        for (int i = 0; i < LM_FLIGHT - 1; ++i) request(i);
    }

    // at: `unit`, or a number that is even if it is.
    __device__ __forceinline__ void request(int at) {
        if (n < end) {
            blocks.fetch(to, first + unit, Blocks::unit_of_tile(first + unit - at, at), next);
            if (++unit == COUNT) {
                asm volatile("");  // a branch: else these addresses are computed for every unit
                unit = 0, n += step, next = blocks.cursor(n, first);
            }
        }
        end_group();
        to = after(to);
    }

    // Adds the next unit, which is `unit` of a split.
    __device__ __forceinline__ void use(int split, int unit, const Input& input, Sums& sums) {
        wait_for_groups<LM_FLIGHT - 2>();
        __syncwarp();  // all lanes' copies are there, and all have used the slot before
        request(UNITS % 2 == 0 ? unit + LM_FLIGHT - 1 : this->unit);
        blocks.use(from, split, unit, input, sums, found);
        from = after(from);
    }

   private:
    __device__ __forceinline__ static int after(int slot) {
        return slot == (LM_FLIGHT - 1) * Blocks::SLOT ? 0 : slot + Blocks::SLOT;
    }
};
static_assert(LM_FLIGHT >= 2, "a unit is requested before it is used");
