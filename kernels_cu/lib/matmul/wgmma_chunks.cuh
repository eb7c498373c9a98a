// Stores of 16-bit outputs of the Hopper products (lib/matmul/wgmma.cuh) in chunks of 64 rows and GEMM_CHUNK columns of
// the sums: a chunk is written to a buffer in shared memory, from which TMA copies it to out. Before that, TMA loads
// the chunk's residual into the same buffer.
#pragma once

#include "lib/storage.cuh"
#include "lib/matmul/wgmma.cuh"

// TRANSPOSED: rows of the sums are columns of out (lib/matmul/wgmma_registers.cuh).
template <bool TRANSPOSED>
struct Chunks {
    char* const buffers;  // BUFFERS chunks
    Barrier* const arrived;
    const Group& group;
    unsigned count = 0;  // number of chunks stored so far

    __device__ char* buffer(unsigned chunk) const { return buffers + chunk % BUFFERS * CHUNK_BYTES; }

    // Offset of the first row and column of chunk c in out. across: chunks next to each other in the sums.
    __device__ static int below(int c, int across) { return TRANSPOSED ? c % across * GEMM_CHUNK : c / across * 64; }
    __device__ static int beside(int c, int across) { return TRANSPOSED ? c / across * 64 : c % across * GEMM_CHUNK; }

    // Requests the residual for chunks `from` .. `to` - 1 of the tile, after earlier stores have read the buffers.
    __device__ void ask(const TensorMap& residual, int from, int to, int row, int column) const {
        if (group.thread != 0) return;
        wait_for_reads<0>();
        for (int c = from; c < to && c < CHUNKS * BLOCKS_M; ++c) {
            Barrier& barrier = arrived[(count + c - from) % BUFFERS];
            const int x = column + beside(c, CHUNKS), y = row + below(c, CHUNKS);
            arrive_and_expect(barrier, CHUNK_BYTES);
            load_box(buffer(count + c - from), residual, barrier, x, y, 0);
        }
    }

    // Stores the group's part of a tile, COLUMNS columns of sums. row, column: the part's first row and column in out.
    // values_of(m) returns the values of 64-row block m of the sums, as a function (block, half, v): it computes the
    // lane's two values v in 8-column block `block`, and row g (`half` 0) or g + 8 (1) of the warp's 16 rows.
    template <int COLUMNS, typename ValuesOf>
    __device__ void store(const ValuesOf& values_of, const TensorMap& residual, const TensorMap& out, int row,
                          int column) {
        constexpr int ACROSS = COLUMNS / GEMM_CHUNK;
        const int lane = group.lane;
        // Offset of the 8 values that this lane addresses in 16 rows by 16 columns, which are four 8x8 matrices.
        // TRANSPOSED: matrix i has rows 8 (i / 2) on and columns 8 (i % 2) on.
        const int place = TRANSPOSED
            ? swizzled((lane / 16 * 8 + lane % 8) * 128 + (2 * group.warp + lane / 8 % 2) * 16)
            : (group.warp * 16 + lane % 16) * GEMM_CHUNK * 2 + lane / 16 * 16;
#pragma unroll
        for (int c = 0; c < ACROSS * BLOCKS_M; ++c, ++count) {
            const auto values = values_of(c / ACROSS);
            int to = shared_address(buffer(count)) + place;
            asm volatile("" : "+r"(to));  // prevents computing the addresses of all chunks early
            const auto at = [&](int j) { return TRANSPOSED ? to + 16 * 128 * j : swizzled<SWIZZLE>(to + 32 * j); };
            unsigned y[GEMM_CHUNK / 16][4];  // y[j][i]: rows g + 8 (i % 2), columns from 16 j + 8 (i / 2), of the sums
            if (GEMM_RESIDUAL) {
                wait(arrived[count % BUFFERS], count / BUFFERS & 1, "residual");
#pragma unroll
                for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                    if (TRANSPOSED) load_transposed(y[j][0], y[j][1], y[j][2], y[j][3], at(j));
                    else load_matrices(y[j][0], y[j][1], y[j][2], y[j][3], at(j));
                }
            }
#pragma unroll
            for (int k = 0; k < GEMM_CHUNK / 4; ++k) {
                const int j = k / 4, i = k % 4;
                float v[2];
                values(c % ACROSS * (GEMM_CHUNK / 8) + 2 * j + i / 2, i % 2, v);
                if (GEMM_RESIDUAL) {
                    float old[2];
                    Vec<T, 2>{y[j][i]}.unpack(old);
                    v[0] += old[0], v[1] += old[1];
                }
                y[j][i] = Vec<T, 2>::pack(v).raw;
            }
            if (GEMM_RESIDUAL) {
                __syncwarp();
            } else {
                if (group.thread == 0) wait_for_reads<BUFFERS - 1>();
                group.sync();
            }
#pragma unroll
            for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                if (TRANSPOSED) store_transposed(at(j), y[j][0], y[j][1], y[j][2], y[j][3]);
                else store_matrices(at(j), y[j][0], y[j][1], y[j][2], y[j][3]);
            }
            show_writes();
            group.sync();
            if (group.thread == 0) {
                store_box(out, buffer(count), column + beside(c, ACROSS), row + below(c, ACROSS), 0);
                end_stores();
            }
            if (GEMM_RESIDUAL && c + BUFFERS < ACROSS * BLOCKS_M) {  // residual of a later chunk
                count += BUFFERS;
                ask(residual, c + BUFFERS, c + BUFFERS + 1, row, column);
                count -= BUFFERS;
            }
        }
    }
};
