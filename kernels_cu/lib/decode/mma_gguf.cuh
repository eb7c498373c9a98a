// GGUF weights of matmul/decode/mma_gguf.cu: copies to shared memory, unpacking, and products. w has up to three ranges
// of outputs, each with its own GGUF type.
//
//   lib/gguf.cuh             layout and unpacking of the blocks
//   lib/decode/order.cuh     the order of the additions
//
// A warp computes 16 columns of the output: two octets (groups of eight rows) of w, which are operand A of an mma. It
// copies units of 128 values along K to its own ring buffer in shared memory. Lanes read data that other lanes have
// copied, and no register holds data that is in flight:
//
//   copy    unit i + 2 of these columns, or the first units of the next columns   cp.async, 16 bytes per lane
//   unpack  unit i: four chunks of 32 values, 18 instructions per chunk if codes have 4 bits; a lane: 8 weights per row
//   add     chunk by chunk in the tensor cores, for each eight rows of x
//
// In Q4_K and Q5_K, codes are multiplied by s, and d is applied to the sum over a block of 256 values. In the other
// types, each sub-block has its own sum, which is multiplied by its scale. Minimums take one mma per block of 256, or
// per unit in other types; it multiplies them by the chunk sums of x: position t holds m of chunk t and the two terms
// of that chunk's sum. A lane unpacks the scales of one chunk, and the four lanes of a row exchange these scales.
//
// NVIDIA H200, 12,288 x 4,096 in Q4_K, one row, in a CUDA graph: 10.9 us, of which 3 us are the same for smaller
// matrices, with 192 instructions of a warp per unit, 48 per 32 values of K. Predicted were 150 instructions, and 9.4
// us, the time to read the weights. An earlier version applied d to each unit, with two sums per unit, and computed all
// addresses again for each copy: 272 instructions, 13.0 us. Run alone, the kernel takes 12.4 us: DRAM runs at
// 48 % of its rate, and each scheduler issues 0.57 instructions per cycle, 0.8 in the loop.
#pragma once
#include "lib/gguf_ranges.cuh"
#include "lib/decode/mma_columns.cuh"

static_assert(LM_COLUMNS == 16 && !LM_LOOP, "a warp has a tile of columns");

constexpr int UNROLLED = UNITS % 2 == 0 ? 2 : 1;  // units per iteration: with 2, their index in a tile is constant

// Returns v. The compiler cannot compute the result again from threadIdx, as it would otherwise do at each use.
__device__ __forceinline__ int kept(int v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }

// The first operand of a product, x (M, LM_K), and the sizes that follow from it.
struct Whole {
    static constexpr int K = LM_K, UNITS = ::UNITS;  // values of K; units per split
    static constexpr bool UP = LM_UP;
    typedef Input Rows;

    __device__ __forceinline__ static int row(int column, int N) { return Column(column, N).n; }  // row of w
};

// The weights of a warp: a ring buffer in shared memory for LM_FLIGHT units of its columns. OfRange: the range of
// outputs, with its GGUF type. Side: the first operand of the product.
template <typename OfRange, typename Side = Whole>
struct Blocks {
    typedef typename OfRange::Of Part;
    typedef typename Side::Rows Rows;
    static constexpr int K = Side::K, UNITS = Side::UNITS;
    static constexpr bool SHORT = order::splits(K) * UNITS * order::UNIT > K;  // last split can be shorter
    // Bytes of an octet (eight rows of w) in the ring: low bits, high bits, and scales of one unit.
    static constexpr int OCTET_BYTES = Part::LOW_BYTES + Part::HIGH_BYTES + Part::SCALE_BYTES;
    static constexpr int SLOT = 2 * OCTET_BYTES;

    const W* w;   // weights of the range of outputs
    const W* up;  // weights of the range in the second matrix, with UP
    W* ring;
    const int N;
    const int to_low, to_more;  // offsets in a slot at which a lane puts low bits, and high bits or scales

    __device__ __forceinline__ Blocks(const W* all, const W* all_up, char* ring, int N)
        : w(all + OfRange::begin(K)), up(Side::UP ? all_up + OfRange::begin(K) : nullptr),
          ring(reinterpret_cast<W*>(ring)), N(N), to_low(kept(threadIdx.x % 32 * 16)),
          to_more(kept((threadIdx.x % 32 < 16 ? 0 : OCTET_BYTES) + Part::LOW_BYTES + own_byte())) {}

    // Addresses from which a lane copies the next unit: low bits of both octets; high bits and scales of the first
    // octet (lanes 0 to 15) or the second. With AT_ONCE (both at most 256 bytes together), some lanes copy high bits
    // and the others scales.
    static constexpr bool AT_ONCE = Part::HIGH_BYTES + Part::SCALE_BYTES <= 256;

    struct Cursor {
        const W* low[2];
        const W* high;
        const W* scales;
    };

    // Returns the index in its tile of unit `first` + `at` of K; a split begins with unit `first`. With an even number
    // of units per split, the index depends only on `at` and can be a compile-time constant.
    __device__ __forceinline__ static int unit_of_tile(int first, int at) {
        return Part::UNITS == 1 ? 0 : (UNITS % 2 == 0 ? at : first + at) % 2;
    }

    __device__ __forceinline__ static int own_byte() { return threadIdx.x % 16 * 16; }
    __device__ __forceinline__ static bool of_scales() { return own_byte() >= Part::HIGH_BYTES; }  // lane copies scales

    // Returns the addresses from which a lane copies unit `unit` of K of the columns from n on.
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

    // Requests a unit into the slot that begins `slot` bytes after the start of the ring, and advances `from` to the
    // next unit. half: index of the unit in its tile.
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

    // Adds the products of a unit to the sums of its split. found: with INTEGERS, the sums over the units of a tile so
    // far.
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
            const W* const lows = from + i * OCTET_BYTES;
            const W* const highs = lows + Part::LOW_BYTES;
            parts[i].load(lows, highs, highs + Part::HIGH_BYTES, half, threadIdx.x % 32 / 4);
            own[i] = parts[i].own(half);
        }
#pragma unroll
        for (int chunk = 0; chunk < UNIT_CHUNKS; ++chunk) {
            order::Columns columns;
            float by[2][2];  // factors for the first and second half of a chunk, per column
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

    // Adds the remaining sums of a tile to the sums of the split: minimums and, with INTEGERS, sums of codes. The
    // tile's units in this split end with `unit`, which has index `half` in the tile.
    __device__ __forceinline__ static void end_tile(const Part (&parts)[2], int half, int split, int unit,
                                                    const Rows& input, Sums& sums, Found& found) {
        if constexpr (Part::MINIMUM) {
            const typename Part::End ends[2] = {parts[0].end(), parts[1].end()};
            constexpr int LAST = Part::UNITS - 1;
            const unsigned least[4] = {ends[0].least[0], ends[1].least[0], LAST ? ends[0].least[LAST] : 0u,
                                       LAST ? ends[1].least[LAST] : 0u};
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {  // lane 4 g + t has m and the sums of x of chunk t
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

// The units of a warp in the order of their use: COUNT units of K from `first` on, for columns n, n + step, ... Each
// unit is requested LM_FLIGHT - 1 units before its use, also across columns.
template <typename Blocks, int COUNT>
struct Stream {
    const Blocks blocks;
    const int first, step, end;
    typename Blocks::Cursor next;
    typename Blocks::Found found = {};
    int n, unit = 0, to = 0, from = 0;  // next requested columns and unit, its slot, and the slot used next

    __device__ __forceinline__ Stream(const Blocks& blocks, int first, int n, int step, int end)
        : blocks(blocks), first(first), step(step), end(end), next(blocks.cursor(n, first)), n(n) {
#pragma unroll
        for (int i = 0; i < LM_FLIGHT - 1; ++i) request(i);
    }

    // Requests the next unit. at: `unit`, or a number with the same parity.
    __device__ __forceinline__ void request(int at) {
        if (n < end) {
            blocks.fetch(to, first + unit, Blocks::unit_of_tile(first + unit - at, at), next);
            if (++unit == COUNT) {
                asm volatile("");  // a branch, which keeps the compiler from computing these addresses for every unit
                unit = 0, n += step, next = blocks.cursor(n, first);
            }
        }
        end_group();
        to = after(to);
    }

    // Adds the products of the next unit to the sums. The unit has index `unit` in its split.
    __device__ __forceinline__ void use(int split, int unit, const Input& input, Sums& sums) {
        wait_for_groups<LM_FLIGHT - 2>();
        __syncwarp();  // the copies of all lanes have arrived, and all lanes have used the previous slot
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
