// Low-rank terms of products (LoRA): adds (x a^T) b to rows y, where each row's sequence has its own factors, or none.
//
//   h = x a^T   y = y + h b
//
//   y (M, N)   x (M, K)   a (R, K), b (R, N), float: the factors of all adapters, one after another
//   up (M, N), or null: a second y of the same x, whose columns follow those of y. b then has 2 N columns
//
//   add_low_rank: for decoding; x and y are float
//   add_low_rank_narrow: for prompts; x and y have the 16-bit type T
//   add_low_rank_mixed: for prompts; x has the 16-bit type T, y, a sum with the residual stream, is float
//
// Row m belongs to sequence row[m], which has the adapter adapter[row[m]]; a row without either is unchanged. `spans`
// has a range of rows of a and b for each adapter and tile of TILE columns. So one launch computes products with the
// same x, such as Q, K and V, whose factors have zeros in the columns of the others.
//
//   64 rows of y    a b . a a . b a a a b a a a b ...     their adapters; "." has none
//   block of a      |     |     first ROWS rows of a |    the next ROWS rows of a
//
// A block finds the rows that have its adapter, and computes ROWS of them together, each as if it were alone. Their x
// is copied to shared memory in chunks. A warp multiplies a chunk by RANKS rows of a: each lane adds products of every
// 32nd vector in their order, shuffles add the sums of the lanes, and the sums of chunks are added in order. The result
// h is in shared memory; it is 0 for the rows that a group lacks. Then a thread adds h b for one column of some rows,
// in the order of the rows of b, and adds this sum to y. The order depends on K and the span alone, so a row has the
// same bits next to any other rows.
//
// With LOW_RANK_TERMS, the values of x are the sums of their 16-bit terms, as the product has read them: x is stored as
// terms if there are many rows, else as floats, and a row has the same bits in both cases.
//
// Every block of an adapter computes the same h. This repeats few operations and saves a launch. Before the wait for
// the previous kernel, a block that probably has rows loads the first rows and channels of a into registers and
// prefetches the other factors into the L2 cache. After the wait, the loads of x depend on the sequences alone, as the
// adapters of the sequences that rows have had before are loaded at the same time. The registers keep a over groups of
// rows if K has one chunk.
//
// grid (tiles, adapters, ceil(M / BLOCK_ROWS)), block (THREADS).
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/operands.cuh"

#ifndef LOW_RANK_WIDTH  // floats per vector of a: gcd(4, K)
#define LOW_RANK_WIDTH 4
#endif
#ifndef LOW_RANK_SPAN  // most rows of a span, rounded up to a multiple of RANKS
#define LOW_RANK_SPAN 16
#endif
#ifndef LOW_RANK_TERMS  // the kind of 16-bit terms of x (lib/operands.cuh), or 0
#define LOW_RANK_TERMS 0
#endif
#ifndef LOW_RANK_STORED  // whether x is stored as terms
#define LOW_RANK_STORED 0
#endif
#ifndef LOW_RANK_UP  // whether there is `up`
#define LOW_RANK_UP 0
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TILE = THREADS;                                // columns of a block, one per thread
constexpr int BLOCK_ROWS = 64, ROWS = 8;                     // rows of a block, and of a group
constexpr int RANKS = 2;                                     // rows of a that a warp multiplies together
constexpr int CHUNK = 1024;                                  // channels of x in shared memory
constexpr int VECTORS = CHUNK / 32 / LOW_RANK_WIDTH;         // vectors of a lane, in a row of a and a chunk
constexpr int COPIED = LOW_RANK_TERMS ? 2 : LOW_RANK_WIDTH;  // values of x that a thread loads at once
constexpr int EACH = CHUNK / THREADS / COPIED;               // loads of a thread, for a row and a chunk
constexpr int TOGETHER = 2;                                  // rows of x that are loaded together
constexpr int LINE = 32;                                     // floats per line of the cache
constexpr int BLOCKS = LOW_RANK_WIDTH < 4 ? 1 : 2;           // blocks per multiprocessor: small vectors need registers
typedef Vec<float, LOW_RANK_WIDTH> Vector;

struct Shared {
    float x[ROWS][CHUNK], h[LOW_RANK_SPAN][ROWS];
    int rows[BLOCK_ROWS], found;
};

__device__ __forceinline__ void prefetch(const float* address) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}

// Loads COPIED values of row m, from channel k on; or the words with the terms of two values, for even k.
template <typename X>
__device__ __forceinline__ Vec<X, COPIED> load_values(const X* x, int m, int k, int M, int K) {
    if constexpr (LOW_RANK_STORED) {
        const unsigned* const words = reinterpret_cast<const unsigned*>(x);
        const long long place = operand_place(m, k, M, K);
        return {{__ldcg(words + place), has_low() ? __ldcg(words + low_place(place)) : 0}};
    } else {
        return load_fresh<X, COPIED>(x + (long long)m * K + k);
    }
}

// Converts the result of load_values to floats: with LOW_RANK_TERMS, to the sums of the values' terms.
template <typename X>
__device__ __forceinline__ void unpack_values(const Vec<X, COPIED>& loaded, float (&v)[COPIED]) {
    loaded.unpack(v);
    if constexpr (LOW_RANK_TERMS) {
        unsigned high = __float_as_int(v[0]), low = __float_as_int(v[1]);
        if constexpr (!LOW_RANK_STORED) split_pair<LOW_RANK_TERMS>(v[0], v[1], 1.0f, high, low);
        float first[2], second[2];
        if (LOW_RANK_TERMS == BF16_TERMS) unpack2_bf16(high, first), unpack2_bf16(low, second);
        else unpack2_fp16(high, first), unpack2_fp16(low, second);
        v[0] = first[0] + second[0], v[1] = first[1] + second[1];
    }
}

// Adds the terms of adapter blockIdx.y to a tile of columns of up to BLOCK_ROWS rows.
template <typename X, typename Y>
__device__ __forceinline__ void add_terms(
    const X* x, const float* a, const float* b, const int* spans, const int* row, const int* adapter, Y* y, Y* up,
    int M, int N, int K, int B) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int columns = LOW_RANK_UP ? 2 * N : N;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = blockIdx.y;
    const int* span = spans + 2 * (own * gridDim.x + blockIdx.x);
    const int first = __ldg(span), count = __ldg(span + 1) - first;
    const int begin = blockIdx.z * BLOCK_ROWS, end = min(M, begin + BLOCK_ROWS);
    const int column = blockIdx.x * TILE + threadIdx.x;
    a += (long long)first * K;
    b += (long long)first * columns;

    Vector held[VECTORS][RANKS];  // a chunk of the rows of a that the warp multiplies next
    const auto load_a = [&](int j, int at) {
        if (j >= count) return;
#pragma unroll
        for (int p = 0; p < RANKS; ++p) {  // rows after the span repeat its last one
            const float* const from = a + (long long)min(j + p, count - 1) * K + at;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const int k = min((32 * i + lane) * LOW_RANK_WIDTH, K - at - LOW_RANK_WIDTH);
                held[i][p] = load_parameters<LOW_RANK_WIDTH>(from + k);
            }
        }
    };
    const auto adapter_of = [&](int r) { return r >= 0 && r < B ? __ldcg(adapter + r) : -1; };

    int guess[BLOCK_ROWS / 32];  // sequences that rows have had before: no result depends on them
    bool used = false;
    if (warp == 0) {
#pragma unroll
        for (int i = 0; i < BLOCK_ROWS / 32; ++i) {
            const int m = begin + 32 * i + lane;
            guess[i] = m < end ? load_racing(row + m) : -1;
            used |= guess[i] >= 0 && guess[i] < B && load_racing(adapter + guess[i]) == own;
        }
    }
    const bool early = __syncthreads_or(used) && count > 0;
    if (early) {
        load_a(RANKS * warp, 0);
        for (int i = threadIdx.x * LINE; i < count * K; i += THREADS * LINE) prefetch(a + i);
        for (int j = warp; j < count; j += WARPS) {
            const int n = blockIdx.x * TILE + lane * LINE;
            if (n < min(columns, (blockIdx.x + 1) * TILE)) prefetch(b + (long long)j * columns + n);
        }
    }
    let_next_start();
    wait_for_previous();
    if (count == 0) return;
    if (warp == 0) {
        int before = 0, sequence[BLOCK_ROWS / 32], number[BLOCK_ROWS / 32];
#pragma unroll
        for (int i = 0; i < BLOCK_ROWS / 32; ++i) {
            const int m = begin + 32 * i + lane;
            sequence[i] = m < end ? __ldcg(row + m) : -1;
            number[i] = adapter_of(guess[i]);
        }
#pragma unroll
        for (int i = 0; i < BLOCK_ROWS / 32; ++i) {
            if (sequence[i] != guess[i]) number[i] = adapter_of(sequence[i]);
            const unsigned votes = __ballot_sync(0xffffffffu, number[i] == own);
            const int place = before + __popc(votes & ((1u << lane) - 1));
            if (number[i] == own) shared.rows[place] = begin + 32 * i + lane;
            before += __popc(votes);
        }
        if (lane == 0) shared.found = before;
    }
    __syncthreads();
    if (!early && shared.found) load_a(RANKS * warp, 0);

    for (int group = 0; group < shared.found; group += ROWS) {
        const int n = min(ROWS, shared.found - group);
        const int* const rows = shared.rows + group;
        for (int at = 0; at < K; at += CHUNK) {
            const int channels = min(CHUNK, K - at);
            __syncthreads();  // all warps have read x, and the h, of before
            for (int from = 0; from < n; from += TOGETHER) {
                Vec<X, COPIED> loaded[TOGETHER * EACH];
#pragma unroll
                for (int i = 0; i < TOGETHER * EACH; ++i) {
                    const int r = from + i / EACH, k = (i % EACH * THREADS + threadIdx.x) * COPIED;
                    if (r < n && k < channels) loaded[i] = load_values(x, rows[r], at + k, M, K);
                }
#pragma unroll
                for (int i = 0; i < TOGETHER * EACH; ++i) {
                    const int r = from + i / EACH, k = (i % EACH * THREADS + threadIdx.x) * COPIED;
                    if (r >= n) break;
                    float v[COPIED] = {};  // x is 0 after K, where a repeats its last values
                    if (k < channels) unpack_values(loaded[i], v);
                    Vec<float, COPIED>::store(&shared.x[r][k], v);
                }
            }
            __syncthreads();
            for (int j = RANKS * warp; j < count; j += RANKS * WARPS) {
                float sums[RANKS * ROWS] = {};
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    if (r >= n) break;
#pragma unroll
                    for (int i = 0; i < VECTORS; ++i) {
                        const int k = (32 * i + lane) * LOW_RANK_WIDTH;
                        float own_x[LOW_RANK_WIDTH], v[LOW_RANK_WIDTH];
                        Vector{*reinterpret_cast<const Vector::Raw*>(&shared.x[r][k])}.unpack(own_x);
#pragma unroll
                        for (int p = 0; p < RANKS; ++p) {
                            float& sum = sums[p * ROWS + r];
                            held[i][p].unpack(v);
#pragma unroll
                            for (int c = 0; c < LOW_RANK_WIDTH; ++c) sum = fmaf(own_x[c], v[c], sum);
                        }
                    }
                }
                const bool same = j + RANKS * WARPS < count;  // the next rows of a have the same channels
                const int then = same ? at : at + CHUNK < K ? at + CHUNK : 0;
                if (same || then || (K > CHUNK || count > RANKS * WARPS) && group + ROWS < shared.found) {
                    load_a(same ? j + RANKS * WARPS : RANKS * warp, then);
                }
#pragma unroll
                for (int bit = 16; bit > 1; bit /= 2) {  // a lane keeps half of its sums, its partner the others
                    const bool upper = lane & bit;
#pragma unroll
                    for (int e = 0; e < bit / 2; ++e) {
                        const float low = sums[e], high = sums[e + bit / 2];
                        sums[e] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
                    }
                }
                const float sum = lanes_sum<2>(sums[0]);
                float& h = shared.h[j][lane / 2];  // h of rank j + lane / 16 and of row lane / 2 % 8
                if (lane % 2 == 0) h = at ? h + sum : sum;
            }
        }
        __syncthreads();
        if (column >= columns) continue;
        Y* const out = LOW_RANK_UP && column >= N ? up + column - N : y + column;
        float old[ROWS], sums[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r < n) old[r] = widen(out[(long long)rows[r] * N]);
        }
#pragma unroll 8
        for (int j = 0; j < count; ++j) {
            const float v = __ldg(b + (long long)j * columns + column);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r / 4 * 4 < n) sums[r] = fmaf(shared.h[j][r], v, sums[r]);  // h of rows after n is 0
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r < n) narrow_to(out[(long long)rows[r] * N], old[r] + sums[r]);
        }
    }
}

// Launched by operation (variant): add_low_rank (terms)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) add_low_rank(
    const float* x,               // (M, K)
    const float* __restrict__ a,  // (R, K)
    const float* __restrict__ b,  // (R, N), or (R, 2N)
    const int* spans,             // (adapters, tiles, 2)
    const int* row,               // (M)
    const int* adapter,           // (B)
    float* y,                     // (M, N)
    float* up,                    // (M, N), or null
    int M, int N, int K, int B) {
    add_terms(x, a, b, spans, row, adapter, y, up, M, N, K, B);
}

// Launched by operation (variant): add_low_rank (terms)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) add_low_rank_narrow(
    const T* x,                   // (M, K)
    const float* __restrict__ a,  // (R, K)
    const float* __restrict__ b,  // (R, N), or (R, 2N)
    const int* spans,             // (adapters, tiles, 2)
    const int* row,               // (M)
    const int* adapter,           // (B)
    T* y,                         // (M, N)
    T* up,                        // (M, N), or null
    int M, int N, int K, int B) {
    add_terms(x, a, b, spans, row, adapter, y, up, M, N, K, B);
}

// Launched by operation (variant): add_low_rank (terms)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) add_low_rank_mixed(
    const T* x,                   // (M, K)
    const float* __restrict__ a,  // (R, K)
    const float* __restrict__ b,  // (R, N), or (R, 2N)
    const int* spans,             // (adapters, tiles, 2)
    const int* row,               // (M)
    const int* adapter,           // (B)
    float* y,                     // (M, N)
    float* up,                    // (M, N), or null
    int M, int N, int K, int B) {
    add_terms(x, a, b, spans, row, adapter, y, up, M, N, K, B);
}
