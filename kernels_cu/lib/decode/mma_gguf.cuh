// GGUF weights w of matmul/decode/mma_gguf.cu: copies to shared memory, unpacking, and products. w has up to three
// ranges of outputs (rows), each of which has one GGUF type.
//
//   lib/gguf.cuh             layout and unpacking of the blocks
//   lib/decode/order.cuh     the order of the additions
//
// A warp computes 16 columns of the output at a time: two row groups (of eight rows) of w, which are operand A of an
// mma. It copies units of 128 values along K to a ring buffer in shared memory that only this warp uses. Lanes read
// data that other lanes have copied, and no register holds data that is in flight:
//
//   copy    unit i + 2 of these columns, or the first units of the next columns   cp.async, 16 bytes per lane
//   unpack  unit i: four chunks of 32 values, 8 weights per lane and row; 18 instructions per chunk if codes have 4
//           bits
//   add     chunk by chunk in the tensor cores, for each eight rows of x
//
// In Q4_K and Q5_K, codes are multiplied by s, and d is applied to the sum over a block of 256 values. In the other
// types, each sub-block has its own sum, which is multiplied by its scale. For the minimums m of a block of 256 (in
// other types: of a unit), one mma multiplies m of each chunk by the sum of x over the chunk, which is two float16
// numbers: position t of K holds m of chunk t in A and the sum of chunk t in B. A lane unpacks the scales of one chunk,
// and the four lanes of a row exchange these scales.
//
// In Q4_K, a warp executes 192 instructions per unit, 48 per chunk; the prediction was 150 per unit. An earlier version
// applied d to each unit, with two sums per unit, and computed all addresses again for each copy: 272 instructions per
// unit, and a longer time.
//
// Measured: docs/experiments.md#products-with-blocks-of-gguf
#pragma once
#include "lib/gguf_ranges.cuh"
#include "lib/decode/mma_columns.cuh"

static_assert(DECODE_COLUMNS == 16 && !DECODE_LOOP, "a warp has a tile of columns");

constexpr int UNROLLED = UNITS % 2 == 0 ? 2 : 1;  // units per iteration; with 2, a unit's index in its tile is constant

// Returns v. Prevents the compiler from computing v, which depends on threadIdx, again at each use.
__device__ __forceinline__ int kept(int v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }

// Describes a product whose operand x is (M, DECODE_K): sizes along K, and the rows of w.
struct Whole {
    static constexpr int K = DECODE_K, UNITS = ::UNITS;  // K: values along K; UNITS: units per split (range of K)
    static constexpr bool UP = DECODE_UP;
    typedef Input Rows;

    __device__ __forceinline__ static int row(int column, int N) { return Column(column, N).n; }  // row of w
};

// Returns the sums of chunks of the unit `half` (0 or 1) units before `unit`, in row tile r.
template <typename Rows>
__device__ __forceinline__ unsigned earlier_sums(const Rows& input, int r, int split, int unit, int half) {
    return input.chunk_sums(r, split, unit - half);
}

// The weights of a warp's columns: a ring buffer in shared memory for DECODE_FLIGHT units of K. OfRange: the range of
// outputs (lib/gguf_ranges.cuh) that contains the columns. Side: the description of the product, such as Whole.
template <typename OfRange, typename Side = Whole>
struct Blocks {
    typedef typename OfRange::Of Part;
    typedef typename Side::Rows Rows;
    static constexpr int K = Side::K, UNITS = Side::UNITS;
    static constexpr bool SHORT = order::splits(K) * UNITS * order::UNIT > K;  // the last split can be shorter
    // Bytes in the ring for a unit (128 values of K) of a row group (eight rows of w): low bits, high bits and scales.
    static constexpr int ROW_GROUP_BYTES = Part::LOW_BYTES + Part::HIGH_BYTES + Part::SCALE_BYTES;
    static constexpr int SLOT = 2 * ROW_GROUP_BYTES;

    const W* w;   // weights of the outputs with one GGUF type (OfRange)
    const W* up;  // weights of these outputs in the matrix `up`; null if Side::UP is false
    W* ring;
    const int N;
    const int to_low, to_more;  // a lane's offsets in a slot: low bits; high bits, scales

    __device__ __forceinline__ Blocks(const W* all, const W* all_up, char* ring, int N)
        : w(all + OfRange::begin(K)), up(Side::UP ? all_up + OfRange::begin(K) : nullptr),
          ring(reinterpret_cast<W*>(ring)), N(N), to_low(kept(threadIdx.x % 32 * 16)),
          to_more(kept((threadIdx.x % 32 < 16 ? 0 : ROW_GROUP_BYTES) + Part::LOW_BYTES + own_byte())) {}

    // Cursor: addresses from which a lane copies the next unit: the low bits of both row groups, and the high bits and
    // scales of the first row group (lanes 0 to 15) or of the second row group (lanes 16 to 31). AT_ONCE: high bits and
    // scales have at most 256 bytes in total; some lanes then copy high bits, the other lanes scales.
    static constexpr bool AT_ONCE = Part::HIGH_BYTES + Part::SCALE_BYTES <= 256;

    struct Cursor {
        const W* low[2];
        const W* high;
        const W* scales;
    };

    // A GGUF tile has one or two units of 128 values of K. Returns the index in its tile of unit `first` + `at`, where
    // `first` is a split's first unit. If splits have an even number of units, the result depends only on `at`.
    __device__ __forceinline__ static int unit_of_tile(int first, int at) {
        return Part::UNITS == 1 ? 0 : (UNITS % 2 == 0 ? at : first + at) % 2;
    }

    __device__ __forceinline__ static int own_byte() { return threadIdx.x % 16 * 16; }
    __device__ __forceinline__ static bool of_scales() { return own_byte() >= Part::HIGH_BYTES; }  // not high bits

    // Returns the addresses from which this lane copies unit `unit` (128 values of K), for the 16 columns from n on.
    __device__ __forceinline__ Cursor cursor(int n, int unit) const {
        const auto row_group = [&](int i) {
            const int row = Side::row(n + 8 * i, N) - OfRange::FROM;
            return (Side::UP && i ? up : w) + (long long)(row / gguf::ROW_GROUP) * Part::row_bytes(K);
        };
        const int low = Part::low_at(unit) + threadIdx.x % 32 * 16;
        const W* const first = row_group(0);
        const W* const second = row_group(1);
        const W* const own = threadIdx.x % 32 < 16 ? first : second;
        Cursor found = {{first + low, second + low}, nullptr, nullptr};
        found.high = own + Part::high_at(unit) + own_byte(), found.scales = own + Part::scales_at(unit) + own_byte();
        if (AT_ONCE && of_scales()) found.high = found.scales - Part::HIGH_BYTES;
        return found;
    }

    typedef Copy16 Started[2 * Part::VECTORS + 2];  // a lane's copies of a unit

    // Requests the copy of unit `unit` into the slot that begins `slot` bytes after the start of the ring, and advances
    // `from` to the next unit. half: 0 or 1, the index of this unit of 128 inputs in its tile of GGUF blocks.
    __device__ __forceinline__ void fetch(int slot, int unit, int half, Cursor& from, Started& started) const {
        if (SHORT && unit * order::UNIT >= K) return;
        W* const to = ring + slot + to_low;
        W* const more = ring + slot + to_more;
        const auto further = [&](int bytes) { return half == Part::UNITS - 1 ? Part::BYTES - half * bytes : bytes; };
#pragma unroll
        for (int row_group = 0; row_group < 2; ++row_group) {
#pragma unroll
            for (int i = 0; i < Part::VECTORS; ++i) {
                Copy16& copy = started[row_group * Part::VECTORS + i];
                copy.start(to + row_group * ROW_GROUP_BYTES + 512 * i, from.low[row_group] + 512 * i, true);
            }
            from.low[row_group] += further(Part::LOW_BYTES);
        }
        constexpr int FIRST = Part::HIGH_BYTES + (AT_ONCE ? Part::SCALE_BYTES : 0);
        if (own_byte() < FIRST) started[2 * Part::VECTORS].start(more, from.high, true);
        from.high += further(AT_ONCE && of_scales() ? 0 : Part::HIGH_BYTES);
        if (AT_ONCE) return;
        if (own_byte() < Part::SCALE_BYTES) {
            started[2 * Part::VECTORS + 1].start(more + Part::HIGH_BYTES, from.scales, true);
        }
        from.scales += further(0);
    }

    // use() adds the products of unit `unit` (128 values of K) of split `split` to `sums`, the split's sums. Found:
    // with INTEGERS, the sums over the current GGUF tile (two units) so far, without the factor d.
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
        Part parts[2];  // weights of columns g and g + 8, for lane 4 g + t
        typename Part::Own own[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const W* const lows = from + i * ROW_GROUP_BYTES;
            const W* const highs = lows + Part::LOW_BYTES;
            parts[i].load(lows, highs, highs + Part::HIGH_BYTES, half, threadIdx.x % 32 / 4);
            own[i] = parts[i].own(half);
        }
        float whole[Part::WHOLE ? ROW_TILES : 1][4] = {};  // with WHOLE, the sums over the unit without the factor d
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Columns columns;
            float by[2][2];  // scales of the chunk's first and second half, for both columns
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned pairs[4];
                parts[i].codes(chunk, Part::by_of(own[i], chunk), pairs);
                gguf::place(pairs, i, columns.value);
                if (!Part::INTEGERS && !Part::WHOLE) by[i][0] = gguf::of_lane(own[i].first, chunk);
                if (Part::HALVES) by[i][1] = gguf::of_lane(own[i].second, chunk);
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                order::Rows x;
                input.get(x, r, split, unit, chunk);
                float part[2][4] = {};
                float (&parted)[4] = Part::WHOLE ? whole[Part::WHOLE ? r : 0] : part[0];
                float (&first)[4] = Part::INTEGERS ? found[Part::INTEGERS ? r : 0] : parted;
                float (&second)[4] = Part::INTEGERS || Part::WHOLE ? first : part[Part::HALVES];
                mma_fp16(first, columns.value[0], x.value[0]);
                mma_fp16(second, columns.value[1], x.value[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& to = sums.of[0][r][i];
                    if (!Part::INTEGERS && !Part::WHOLE) to = fmaf(by[i / 2][0], part[0][i], to);
                    if (Part::HALVES) to = fmaf(by[i / 2][1], part[1][i], to);
                }
            }
        }
#pragma unroll
        for (int r = 0; Part::WHOLE && r < ROW_TILES; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& to = sums.of[0][r][i];
                to = fmaf(own[i / 2].first, whole[Part::WHOLE ? r : 0][i], to);
            }
        }
        if (half == Part::UNITS - 1 || unit + 1 == UNITS) end_tile(parts, half, split, unit, input, sums, found);
    }

    // Adds the other sums of a GGUF tile (one or two units of K) to the sums of the split: products of minimums and,
    // with INTEGERS, sums of codes. unit: the tile's last unit in this split. half: index of this unit in the tile.
    __device__ __forceinline__ static void end_tile(const Part (&parts)[2], int half, int split, int unit,
                                                    const Rows& input, Sums& sums, Found& found) {
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            constexpr int LAST = Part::UNITS - 1;
            const unsigned least[4] = {ends[0].least[0], ends[1].least[0], LAST ? ends[0].least[LAST] : 0u,
                                       LAST ? ends[1].least[LAST] : 0u};
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {  // lane 4 g + t has m of chunk t and the sum of x over chunk t
                float minimum[4] = {};
                unsigned of_x[2] = {};
                if (unit >= half) of_x[0] = earlier_sums(input, r, split, unit, half);
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

// The units that a warp multiplies, in this order: COUNT units (128 values of K each) from unit `first` on for the 16
// columns from n on, then the same units for the columns from n + step on, and so on up to `end`. Each unit is
// requested DECODE_FLIGHT - 1 units before its use.
template <typename Blocks, int COUNT>
struct Stream {
    const Blocks blocks;
    const int first, step, end;
    typename Blocks::Cursor next;
    typename Blocks::Found found = {};
    typename Blocks::Started started;
    int n, unit = 0, to = 0, from = 0;  // columns, unit and slot of the next request; slot of the next use

    __device__ __forceinline__ Stream(const Blocks& blocks, int first, int n, int step, int end)
        : blocks(blocks), first(first), step(step), end(end), next(blocks.cursor(n, first)), n(n) {
#pragma unroll
        for (int i = 0; i < DECODE_FLIGHT - 1; ++i) {
            request(i);
            end_copies(started);
        }
    }

    // Requests the copy of the next unit (128 values of K). `at`: the member `unit`, or a number with the same parity.
    __device__ __forceinline__ void request(int at) {
        if (n < end) {
            blocks.fetch(to, first + unit, Blocks::unit_of_tile(first + unit - at, at), next, started);
            if (++unit == COUNT) {
                asm volatile("");  // forces a branch: otherwise these addresses would be computed for every unit
                unit = 0, n += step, next = blocks.cursor(n, first);
            }
        }
        end_group();
        to = after(to);
    }

    // Adds the products of the next unit (128 values of K) to `sums`. `unit`: index of this unit in split `split`.
    __device__ __forceinline__ void use(int split, int unit, const typename Blocks::Rows& input, Sums& sums) {
        wait_for_groups<DECODE_FLIGHT - 2>();
        __syncwarp();  // the copies of all lanes have arrived, and all lanes have used the previous slot
        request(UNITS % 2 == 0 ? unit + DECODE_FLIGHT - 1 : this->unit);
        blocks.use(from, split, unit, input, sums, found);
        end_copies(started);
        from = after(from);
    }

   private:
    __device__ __forceinline__ static int after(int slot) {
        return slot == (DECODE_FLIGHT - 1) * Blocks::SLOT ? 0 : slot + Blocks::SLOT;
    }
};
static_assert(DECODE_FLIGHT >= 2, "a unit is requested before it is used");
