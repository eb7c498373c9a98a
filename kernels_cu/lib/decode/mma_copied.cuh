// Rows of x for matmul/decode/mma_gguf.cu that are stored as an operand: a float16 term per value in wgmma order, with
// the sums of chunks (lib/operands.cuh and lib/chunk_sums.cuh). This is for many rows on GPUs without wgmma. Copies to
// shared memory need no registers and no arithmetic, unlike lib/decode/mma_staged.cuh.
//
//   all threads    [ wait for the copies of unit u, barrier | request unit u + DECODE_FLIGHT - 1 | multiply unit u ]
//
// A unit of 128 values is two slices of the operand. A slice has a line of 128 bytes for each row, whose 16-byte parts
// are swizzled. Memory and shared memory have the same order, in which eight lanes of an ldmatrix read different banks.
#pragma once
#include "lib/decode/mma_gguf.cuh"

static_assert(DECODE_ALONE && !DECODE_NORM && OPERAND_TERMS == 1 && OPERAND_WIDTH == 2, "x is an operand of one term");

struct Copied {
    static constexpr int LINE = 128, SLICE = DECODE_ROWS * LINE, TERMS_BYTES = 2 * SLICE, SUMS_BYTES = DECODE_ROWS * 16;
    // A tile of GGUF blocks ends with the sums of its two units, so the sums of a unit stay longer than its terms.
    static constexpr int SUMS = DECODE_FLIGHT + 1, COPIES = DECODE_FLIGHT * TERMS_BYTES + SUMS * SUMS_BYTES;
    static constexpr int PLANE = 4 * DECODE_ROWS * (DECODE_COLUMNS * WARPS + 8);  // sums, which replace the copies
    static constexpr int BYTES = COPIES > PLANE ? COPIES : PLANE;
    static_assert((SUMS & (SUMS - 1)) == 0 && DECODE_ROWS % 8 == 0, "a remainder is a mask; ldmatrix reads 8 rows");

    const Input& input;
    const int lines;          // rows of the operand's tile that contains the block's rows
    const char *terms, *sums;  // unit 0, from the block's first row on; sums: null if no type has minimums
    int slot = 0, last = 0;

    __device__ __forceinline__ Copied(const Input& input, const float* all_sums)
        : input(input), lines(min((int)OPERAND_ROWS, input.M - tile(input))) {
        const int row = input.first - tile(input);
        terms = reinterpret_cast<const char*>(input.x) + (long long)tile(input) * DECODE_K * 2 + row * LINE;
        sums = reinterpret_cast<const char*>(all_sums);
        if (sums) sums += (long long)tile(input) * (DECODE_K / order::UNIT) * 16 + row * 16;
    }

    // Requests the first DECODE_FLIGHT - 1 of units first, ..., end - 1, and waits for all copies of this thread.
    __device__ __forceinline__ void begin(int first, int end) {
        slot = 0, last = end;
#pragma unroll
        for (int i = 0; i < DECODE_FLIGHT - 1; ++i) request(i, first + i);
        end_group();
        wait_for_groups<0>();
    }

    // Calls multiply(), which closes a group of copies, when `unit` has arrived.
    template <typename Multiply>
    __device__ __forceinline__ void use(int unit, Multiply multiply) {
        wait_for_groups<DECODE_FLIGHT - 2>();
        __syncthreads();  // all warps have multiplied the unit whose buffer is overwritten
        request(slot == 0 ? DECODE_FLIGHT - 1 : slot - 1, unit + DECODE_FLIGHT - 1);
        multiply();
        slot = slot == DECODE_FLIGHT - 1 ? 0 : slot + 1;
    }

    // Loads the lane's values of a chunk for the 8 rows of tile i: half of a line of 128 bytes in each row.
    __device__ __forceinline__ void get(order::Rows& to, int i, int, int, int chunk) const {
        const int lane = threadIdx.x % 32, part = chunk % 2 * 4 + lane / 8;
        const char* const line = input.shared + slot * TERMS_BYTES + chunk / 2 * SLICE + (8 * i + lane % 8) * LINE;
        unsigned (&v)[order::STEPS][2] = to.value;
        load_matrices<false>(v[0][0], v[0][1], v[1][0], v[1][1], line + (part ^ lane % 8) * 16);
    }

    // Returns the sum over chunk t of a unit, for row g of tile i and lane 4 g + t.
    __device__ __forceinline__ unsigned chunk_sums(int i, int split, int unit) const {
        const char* const row = sums_of(split * UNITS + unit) + (8 * i + threadIdx.x % 32 / 4) * 16;
        return reinterpret_cast<const unsigned*>(row)[threadIdx.x % 4];
    }

private:
    // Returns the first row of the operand's tile (OPERAND_ROWS rows) that contains the block's rows.
    static __device__ __forceinline__ int tile(const Input& input) {
        return input.first / (int)OPERAND_ROWS * (int)OPERAND_ROWS;
    }

    // Returns the place of a unit's chunk sums: (DECODE_ROWS, 4) words.
    __device__ __forceinline__ char* sums_of(int unit) const {
        return input.shared + DECODE_FLIGHT * TERMS_BYTES + (unit & SUMS - 1) * SUMS_BYTES;
    }

    // Requests the copy of a unit into buffer `to`. Rows after the last one keep what is there: no output reads them.
    __device__ __forceinline__ void request(int to, int unit) const {
        if (unit >= last || unit * order::UNIT >= DECODE_K) return;
        const int rows = min(DECODE_ROWS, input.M - input.first), own = threadIdx.x * 16;
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
            const char* const from = terms + (long long)(2 * unit + slice) * lines * LINE;
            char* const shared = input.shared + to * TERMS_BYTES + slice * SLICE;
#pragma unroll 1
            for (int at = own; at < rows * LINE; at += THREADS * 16) Copy16().start(shared + at, from + at, true);
        }
        if (sums && (int)threadIdx.x < rows) {
            Copy16().start(sums_of(unit) + own, sums + (long long)unit * lines * 16 + own, true);
        }
    }
};
static_assert(THREADS >= DECODE_ROWS, "a thread copies the sums of a row");
