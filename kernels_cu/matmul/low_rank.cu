// Low-rank terms of products (LoRA): adds (x a^T) b to rows y, where each row's sequence has its own factors, or none.
//
//   h = x a^T   y = y + h b
//
//   y (M, N)   x (M, K)   a (R, K), b (R, N), float: the factors of all adapters, one after another
//   up (M, N), or null: a second y of the same x, whose columns follow those of y. b then has 2 N columns
//
//   add_low_rank: x and y have the type T: floats in decoding, 16 bits in prompts
//   add_low_rank_mixed: x has the 16-bit type T; y, a sum with the residual stream of prompts, is float
//
// Row m belongs to sequence row[m], which has the adapter adapter[row[m]]; a row without either is unchanged. `spans`
// has a range of rows of a and b for each adapter and tile of TILE columns. So one launch computes products with the
// same x, such as Q, K and V, whose factors have zeros in the columns of the others.
//
//   64 rows of y          a b . a a . b a a a b a a a b ...      their adapters; "." has none
//   cluster of a          first ROWS rows of a | the next ROWS rows of a
//   its blocks, for h     part 0 of K | part 1 | ... | part 7    of all rows of the span
//   its blocks, for y     COLUMNS columns | COLUMNS columns | ...
//
// The adapters of BLOCK_ROWS rows are numbered in the order of their first rows. A cluster finds the rows of one of
// them, and computes ROWS of these rows together, each as if it were alone. A block multiplies its part of K. It copies
// x to shared memory in chunks. A warp multiplies a chunk by RANKS rows of a: each lane adds products of every 32nd
// vector in their order, shuffles add the sums of the lanes, and the sums of chunks are added in order. A block stores
// its sums in the shared memory of all blocks, each of which then adds the parts in order. Then a thread adds h b for
// one column of some rows, in the order of the rows of b, and adds this sum to y. The order depends on K and the span
// alone, so a row has the same bits next to any other rows. On GPUs without clusters, K has one part.
//
// With LOW_RANK_TERMS, the values of x are the sums of their 16-bit terms, as the product has read them: x is stored as
// terms if there are many rows, else as floats, and a row has the same bits in both cases.
//
// Clusters with the same adapter compute the same h. This repeats few operations and saves a launch. No kernel that can
// overlap with this one writes `row` and `adapter`. Before the wait for the previous kernel, a block therefore copies
// its first factors to shared memory, where they stay for all groups of rows if the block has no others. A block
// without rows ends after the wait.
//
// grid (blocks of COLUMNS columns, min(adapters, M, BLOCK_ROWS), ceil(M / BLOCK_ROWS)), block (THREADS).
#include "lib/cluster.cuh"
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/sm80.cuh"
#include "lib/operands.cuh"

#ifndef LOW_RANK_WIDTH  // floats per vector of a: gcd(4, K)
#define LOW_RANK_WIDTH 4
#endif
#ifndef LOW_RANK_B_WIDTH  // floats per vector of b: gcd(4, N)
#define LOW_RANK_B_WIDTH 4
#endif
#ifndef LOW_RANK_PARTS  // parts of K: blocks of a cluster
#define LOW_RANK_PARTS 1
#endif
#ifndef LOW_RANK_CHUNK  // channels of x and a in shared memory
#define LOW_RANK_CHUNK 512
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
constexpr int COLUMNS = 128, TILE = 8 * COLUMNS;             // columns of a block, and of a cluster
constexpr int BLOCK_ROWS = 64, ROWS = 8;                     // rows of a cluster, and of a group
constexpr int OWN = ROWS * COLUMNS / THREADS;                // rows of a group to which a thread adds terms
constexpr int RANKS = 2;                                     // rows of a that a warp multiplies together
constexpr int PARTS = LOW_RANK_PARTS, CHUNK = LOW_RANK_CHUNK, SLICE = CHUNK > 256 ? 16 : 32;
constexpr int UNIT = 32 * LOW_RANK_WIDTH;                    // channels of a vector of each lane
constexpr int COPIED = LOW_RANK_TERMS ? 2 : LOW_RANK_WIDTH;  // values of x that a thread loads at once
constexpr int OF_X = ROWS * CHUNK / THREADS / COPIED;        // loads of x in flight per thread: a group and a chunk
constexpr int OF_FACTORS = (CHUNK + 63) / 64;                // loads of a or b in flight per thread
constexpr int BLOCKS = LOW_RANK_WIDTH == 1 ? 1 : CHUNK > 128 ? 2 : 3;  // blocks per multiprocessor
typedef Vec<float, LOW_RANK_WIDTH> Vector;

struct Shared {
    float x[ROWS][CHUNK], a[SLICE][CHUNK], b[SLICE][COLUMNS], parts[2][PARTS][SLICE][ROWS], h[SLICE][ROWS];
    int rows[BLOCK_ROWS], found, adapter;
};

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

// Converts loaded values to floats. TERMS: to the sums of the terms of values that load_values has loaded.
template <bool TERMS, typename E, int WIDTH>
__device__ __forceinline__ void unpack_values(const Vec<E, WIDTH>& loaded, float (&v)[WIDTH]) {
    loaded.unpack(v);
    if constexpr (TERMS) {
        unsigned high = __float_as_int(v[0]), low = __float_as_int(v[1]);
        if constexpr (!LOW_RANK_STORED) split_pair<LOW_RANK_TERMS>(v[0], v[1], 1.0f, high, low);
        float first[2], second[2];
        if (LOW_RANK_TERMS == BF16_TERMS) unpack2_bf16(high, first), unpack2_bf16(low, second);
        else unpack2_fp16(high, first), unpack2_fp16(low, second);
        v[0] = first[0] + second[0], v[1] = first[1] + second[1];
    }
}

// Copies `count` rows to shared memory. load(row, column) loads WIDTH values. A thread has LOADS loads in flight.
template <int WIDTH, int LOADS, bool TERMS, int COLUMNS_OF_ROW, typename Load>
__device__ __forceinline__ void copy_rows(float (*to)[COLUMNS_OF_ROW], int count, const Load& load) {
#pragma unroll 1
    for (int begin = threadIdx.x * WIDTH; begin < count * COLUMNS_OF_ROW; begin += LOADS * THREADS * WIDTH) {
        decltype(load(0, 0)) loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int place = begin + i * THREADS * WIDTH, row = place / COLUMNS_OF_ROW;
            if (row < count) loaded[i] = load(row, place % COLUMNS_OF_ROW);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int place = begin + i * THREADS * WIDTH;
            float v[WIDTH];
            unpack_values<TERMS>(loaded[i], v);
            if (place / COLUMNS_OF_ROW < count) Vec<float, WIDTH>::store(&to[0][place], v);
        }
    }
}

// Finds the rows of the adapter with number `nth` among the adapters of the rows from `begin` to end - 1, in the order
// of their first rows. Stores the rows, their number, and the adapter. One warp calls this function.
__device__ __forceinline__ void find_rows(Shared& shared, const int* row, const int* adapter, int begin, int end,
                                          int nth, int B, int L) {
    const int lane = threadIdx.x % 32;
    int number[2], own = -1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int m = begin + 32 * i + lane, sequence = m < end ? __ldcg(row + m) : -1;
        number[i] = sequence >= 0 && sequence < B ? __ldcg(adapter + sequence) : -1;
    }
    const auto where = [&](int least, int most) {  // a bit for each row
        const auto vote = [&](int i) { return __ballot_sync(~0u, number[i] >= least && number[i] <= most); };
        return vote(0) | (unsigned long long)vote(1) << 32;
    };
    unsigned long long mine = 0, left = where(0, L - 1);
    for (int n = 0; n <= nth; ++n) {  // if no rows are left, none is found
        const int first = __ffsll(left) - 1;
        own = __shfl_sync(~0u, first < 32 ? number[0] : number[1], first & 31);
        mine = left & where(own, own);
        left ^= mine;
    }
#pragma unroll
    for (int i = lane; i < BLOCK_ROWS; i += 32) {
        if (mine >> i & 1) shared.rows[__popcll(mine & ((1ull << i) - 1))] = begin + i;
    }
    if (lane == 0) shared.found = __popcll(mine), shared.adapter = own;
}

// Returns the sum over the lanes of sums[lane / 2]. A lane keeps half of its sums, its partner the others.
template <int COUNT>
__device__ __forceinline__ float own_sum(const float (&sums)[COUNT]) {
    if constexpr (COUNT == 1) return lanes_sum<2>(sums[0]);
    else {
        float half[COUNT / 2];
        const bool upper = threadIdx.x & COUNT;
#pragma unroll
        for (int e = 0; e < COUNT / 2; ++e) {
            const float low = sums[e], high = sums[e + COUNT / 2];
            half[e] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, COUNT);
        }
        return own_sum(half);
    }
}

// Adds the terms of an adapter to COLUMNS columns of up to BLOCK_ROWS rows.
template <typename X, typename Y>
__device__ __forceinline__ void add_terms(
    const X* x, const float* a, const float* b, const int* spans, const int* row, const int* adapter, Y* y, Y* up,
    int M, int N, int K, int B, int L) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int columns = LOW_RANK_UP ? 2 * N : N, tiles = (columns + TILE - 1) / TILE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = PARTS > 1 ? rank_in_cluster() : 0;
    const int length = (K + PARTS * UNIT - 1) / (PARTS * UNIT) * UNIT;  // channels of a part
    const int from = part * length, until = min(K, from + length);
    const int begin = blockIdx.z * BLOCK_ROWS, column = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    const int own_row = threadIdx.x / COLUMNS * OWN;  // the thread's first row of a group
    if (PARTS > 1) arrive_in_cluster();
    if (warp == 0) find_rows(shared, row, adapter, begin, min(M, begin + BLOCK_ROWS), blockIdx.y, B, L);
    __syncthreads();
    const int found = shared.found;
    const int* span = spans + 2 * (found ? shared.adapter * tiles + blockIdx.x / (TILE / COLUMNS) : 0);
    const int first = __ldg(span), count = found ? __ldg(span + 1) - first : 0;
    const auto copy_a = [&](int j, int at) {  // channels after K repeat its last ones
        copy_rows<LOW_RANK_WIDTH, OF_FACTORS, false>(shared.a, min(SLICE, count - j), [&](int rank, int k) {
            return Vector::load(a + (long long)(first + j + rank) * K + min(at + k, K - LOW_RANK_WIDTH));
        });
    };
    const auto copy_b = [&](int j) {
        copy_rows<LOW_RANK_B_WIDTH, OF_FACTORS, false>(shared.b, min(SLICE, count - j), [&](int rank, int n) {
            const int at = min(blockIdx.x * COLUMNS + n, columns - LOW_RANK_B_WIDTH);
            return Vec<float, LOW_RANK_B_WIDTH>::load(b + (long long)(first + j + rank) * columns + at);
        });
    };
    let_next_start();
    copy_a(0, from);
    copy_b(0);
    if (PARTS > 1) wait_for_cluster();  // all blocks have started: their shared memory can be written
    wait_for_previous();
    if (count == 0) return;

    Y* const out = LOW_RANK_UP && column >= N ? up + column - N : y + column;
    int turn = 0;  // while a block reads its parts, others may store the next ones
    for (int group = 0; group < found; group += ROWS) {
        const int n = min(ROWS, found - group), own_rows = column < columns ? min(OWN, n - own_row) : 0;
        const int* const rows = shared.rows + group;
        float old[OWN], sums_of_rows[OWN] = {};
        for (int slice = 0; slice < count; slice += SLICE, turn ^= 1) {
            const int ranks = min(SLICE, count - slice);
            for (int at = from; at == from || at < until; at += CHUNK) {
                const bool others = slice + group + at > from && (length > CHUNK || count > SLICE);
                if (slice == 0 || others) {
                    __syncthreads();  // all warps have read x, a and b of before
                    if (others) copy_a(slice, at);
                    if (others && at == from) copy_b(slice);
                    copy_rows<COPIED, OF_X, LOW_RANK_TERMS != 0>(shared.x, n, [&](int r, int k) {  // 0 after the part
                        return at + k < until ? load_values(x, rows[r], at + k, M, K) : Vec<X, COPIED>{};
                    });
                    __syncthreads();
                }
                for (int j = RANKS * warp; j < ranks; j += RANKS * WARPS) {
                    float sums[RANKS * ROWS] = {};
                    for (int k = lane * LOW_RANK_WIDTH; k < CHUNK; k += UNIT) {
                        float factors[RANKS][LOW_RANK_WIDTH];
#pragma unroll
                        for (int p = 0; p < RANKS; ++p) {  // a rank after the last one repeats it
                            const float* const values = &shared.a[min(j + p, ranks - 1)][k];
                            Vector{*reinterpret_cast<const Vector::Raw*>(values)}.unpack(factors[p]);
                        }
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) {
                            if (r >= n) break;
                            float own_x[LOW_RANK_WIDTH];
                            Vector{*reinterpret_cast<const Vector::Raw*>(&shared.x[r][k])}.unpack(own_x);
#pragma unroll
                            for (int p = 0; p < RANKS; ++p) {
                                float& sum = sums[p * ROWS + r];
#pragma unroll
                                for (int c = 0; c < LOW_RANK_WIDTH; ++c) sum = fmaf(own_x[c], factors[p][c], sum);
                            }
                        }
                    }
                    float sum = own_sum(sums);  // the sum of rank j + lane / 16, row lane / 2 % 8
                    if (lane % 2) continue;
                    float* const h = &shared.parts[turn][part][j + lane / 16][lane / 2 % ROWS];
                    sum = at > from ? *h + sum : sum;
                    if (PARTS == 1 || at + CHUNK < until) *h = sum;
                    else for (int block = 0; block < PARTS; ++block) *in_block_of_cluster(h, block) = sum;
                }
            }
#pragma unroll
            for (int r = 0; r < OWN; ++r) {
                if (r < own_rows && slice + SLICE >= count) old[r] = widen(out[(long long)rows[own_row + r] * N]);
            }
            if (PARTS > 1) release_to_cluster(), acquire_from_cluster();
            else __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < ranks * ROWS; i += THREADS) {
                float sum = 0.0f;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) sum += shared.parts[turn][p][i / ROWS][i % ROWS];
                shared.h[i / ROWS][i % ROWS] = sum;
            }
            __syncthreads();
#pragma unroll 4
            for (int j = 0; j < ranks && own_row < n; ++j) {
                const float v = shared.b[j][threadIdx.x % COLUMNS];
#pragma unroll
                for (int r = 0; r < OWN; ++r) sums_of_rows[r] = fmaf(shared.h[j][own_row + r], v, sums_of_rows[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            if (r < own_rows) narrow_to(out[(long long)rows[own_row + r] * N], old[r] + sums_of_rows[r]);
        }
    }
}

// Launched by operation (variant): add_low_rank (terms)
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, BLOCKS) add_low_rank(
    const T* x,                     // (M, K)
    const float* __restrict__ a,    // (R, K)
    const float* __restrict__ b,    // (R, N), or (R, 2N)
    const int* __restrict__ spans,  // (L, tiles, 2)
    const int* row,                 // (M); kernels that can overlap with this one do not write it
    const int* adapter,             // (B); kernels that can overlap with this one do not write it
    T* y,                           // (M, N)
    T* up,                          // (M, N), or null
    int M, int N, int K, int B, int L) {
    add_terms(x, a, b, spans, row, adapter, y, up, M, N, K, B, L);
}

// Launched by operation (variant): add_low_rank (terms)
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, BLOCKS) add_low_rank_mixed(
    const T* x, const float* __restrict__ a, const float* __restrict__ b, const int* __restrict__ spans, const int* row,
    const int* adapter, float* y, float* up, int M, int N, int K, int B, int L) {  // shapes as in add_low_rank
    add_terms(x, a, b, spans, row, adapter, y, up, M, N, K, B, L);
}
