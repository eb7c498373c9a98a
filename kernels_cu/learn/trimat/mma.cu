// Trimat for sm_75 and newer (the variant after learn/trimat/ladder.cu and learn/trimat/pipelined.cu):
//
//   out[b,h,i,j] = Q_i . K_j / sqrt(HS) for j <= i
//
//   qkv (B, T, 3, NH, HS)   Q and K are used; consecutive rows of a head (HS values each) are 3 NH HS values apart
//   out (B, NH, T, T)       above the diagonal, up to 3 values per row next to it are written, no other values
//
//   matmul_tri6: tensor cores with float32 accuracy: each row is split into two float16 rows when it is loaded
//
// A block computes the products of one tile of TILE rows of Q with up to `span` tiles of K, one after the other. A row
// x is split into two float16 rows and a scale:
//
//   x = (hi + lo) scale     hi = fp16(x / scale), lo = fp16(x / scale - hi)
//
// where scale is a power of two that brings the row's largest magnitude to between 2^14 and 2^15. The split keeps 22
// bits of a value. Values at least 2^17 times smaller than the largest keep only their bits above 2^-39 of the largest.
// Three of the four products are computed:
//
//   Q_i . K_j = (sum (hi lo + lo hi) + sum hi hi) scale_i scale_j
//
// A tensor core truncates its addends at the magnitude of the current sum. Therefore the small products are added
// first, and a sum of hi hi has at most 128 terms, 8 additions. The truncation then loses less than a chain of rounded
// float additions.
//
//   loading    rows are copied into shared memory (cp.async) while the previous tile is multiplied. A thread converts
//              the values that it copied, in place: hi and lo of 8 values take as many bytes as the values
//   Q          stays in registers, as mma fragments, for all tiles of a block
//   transpose  a warp multiplies K by Q, not Q by K, so that a lane receives 4 neighbouring columns of out. For this,
//              row 4 g + e of each 32 rows is stored as row 8 e + g. 8 lanes then fill 128 bytes of a row of out
//   store      streaming stores leave the L2 cache to Q and K, which are read again
//
// A row with infinities or NaN gives the same results as float sums, infinities or NaN. One exception: infinity times a
// value 2^39 times smaller than the largest of its row gives NaN. The order of the HS values in a row does not matter.
//
// Measured: docs/experiments.md#trimat
//
// Source of the idea: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the
// FP32 theoretical peak performance" (2022).
//
// Block (THREADS), grid (`heads` times the segments of a head, see choose_job), dynamic shared memory 2 TILE PITCH + 12
// TILE bytes. Any T; HS is a multiple of 4, up to 128. qkv and out are aligned to 16 bytes.
#define STORAGE_FP16 1
#include "lib/common.cuh"
#include "lib/storage.cuh"
#include "lib/triangle.cuh"
#include "lib/sm80.cuh"

#ifndef NH
#define NH 12
#endif
#ifndef HS
#define HS 64
#endif
#ifndef TRI_TILE
#define TRI_TILE 128
#endif
#ifndef TRI_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define TRI_BLOCKS 2
#endif
static_assert(NH > 0 && HS > 0 && HS % 4 == 0, "rows are read as float4: HS must be a multiple of 4");
static_assert(HS <= 128, "sums are not promoted on the way");

constexpr int ROW = 3 * NH * HS;  // floats between consecutive rows of a head
constexpr int TILE = TRI_TILE, WARPS = 4, THREADS = 32 * WARPS;
constexpr int FRAGS = TILE / 8 / WARPS;                    // fragments of 8 rows of Q per warp
constexpr int STEPS = (HS + 15) / 16, CHUNKS = 2 * STEPS;  // a row has STEPS groups of 16, CHUNKS groups of 8 values
constexpr int PART = 16 * CHUNKS, PITCH = 2 * PART + 16;   // PART: bytes of hi (or lo) of a row; PITCH: bytes per row
constexpr int LANES = CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : 2;  // threads that share a row
constexpr int COPIED = THREADS / LANES;                                       // rows that the block copies at a time
static_assert(TILE % 32 == 0 && FRAGS * 8 * WARPS == TILE && 4 % FRAGS == 0, "a warp's fragments are of 32 rows");
static_assert(TILE % COPIED == 0, "all threads copy alike");

// Returns the position of row r of a tile in shared memory. The function only permutes bits, so place(a + b) = place(a)
// + place(b) if a < 2^n and 2^n divides b.
__device__ constexpr int place(int r) { return r / 32 * 32 + r % 4 * 8 + r % 32 / 4; }

// The values of a tile that a thread copies: 8 values of every COPIED-th row, 4 from each half of the row. They are
// copied to the place where their hi and lo are stored later.
struct Share {
    static constexpr int SCALES = TILE * PITCH, BUFFER = SCALES + 4 * TILE;  // bytes: SCALES: rows; BUFFER: and scales
    static constexpr int BATCH = TILE < 4 * COPIED ? TILE / COPIED : 4;  // rows that a thread converts at once
    static_assert(BATCH * COPIED % 32 == 0 && TILE % (BATCH * COPIED) == 0, "place() is linear from batch to batch");
    const int row = threadIdx.x / LANES, part = threadIdx.x % LANES;
    const int offset = place(row) * PITCH + 16 * part;
    const bool has = CHUNKS == LANES || part < CHUNKS;

    // Copies the thread's values of a tile. `from`: the tile's first row; `left`: number of rows from there to the end
    // of the sequence.
    __device__ __forceinline__ void copy(char* buffer, const float* from, int left) const {
        if (!has) return;
        from += (long long)row * ROW + 4 * part;
#pragma unroll
        for (int i = 0; i < TILE; i += COPIED) {
            char* to = buffer + offset + place(i) * PITCH;
            copy16(to, from, row + i < left && 4 * part < HS);
            copy16(to + PART, from + HALF, row + i < left && 4 * part + HALF < HS);
            from += COPIED * ROW;
        }
    }

    // Converts rows to hi and lo in place and stores their scales times `unit`. A negative scale marks a row for the
    // slower path of the kernel: a row whose scale is far from 1, and all rows of a warp that converts an infinity or
    // NaN.
    __device__ __forceinline__ void split(char* buffer, char* to, float unit) const {
        float* scales = reinterpret_cast<float*>(to);
        unsigned lows = 0;  // two float16 sums of lo, not finite if a value is not finite
        buffer += offset;
#pragma unroll 1
        for (int first = 0; first < TILE; first += BATCH * COPIED, buffer += BATCH * COPIED * PITCH) {
            float x[BATCH][8], most[BATCH];
            bool finite = true;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const char* at = buffer + place(i * COPIED) * PITCH;
                const float4 zero = {};
                const float4 a = has ? *reinterpret_cast<const float4*>(at) : zero;
                const float4 b = has ? *reinterpret_cast<const float4*>(at + PART) : zero;
                x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w;
                x[i][4] = b.x, x[i][5] = b.y, x[i][6] = b.z, x[i][7] = b.w;
            }
            largest<false>(x, most);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) finite &= most[i] < INFINITY;
            if (__any_sync(0xffffffffu, !finite)) largest<true>(x, most);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                char* at = buffer + place(i * COPIED) * PITCH;
                const int exponent = max(__float_as_int(most[i]) >> 23, 19);  // rows of smaller values stay below 2^14
                const float up = __int_as_float((268 - exponent) << 23), scale = __int_as_float((exponent - 14) << 23);
                unsigned hi[4], lo[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float v = x[i][2 * e] * up, w = x[i][2 * e + 1] * up;
                    float near[2];
                    hi[e] = pack2(v, w);
                    Vec<T, 2>{hi[e]}.unpack(near);
                    lo[e] = pack2(v - near[0], w - near[1]);
                    lows = add2(lows, lo[e]);
                }
                if (has) {
                    *reinterpret_cast<uint4*>(at) = {hi[0], hi[1], hi[2], hi[3]};
                    *reinterpret_cast<uint4*>(at + PART) = {lo[0], lo[1], lo[2], lo[3]};
                }
                const bool far = (exponent < 81 && most[i] > 0.0f) || exponent > 201;  // below 2^-60, above 2^60
                if (part == 0) scales[row + first + i * COPIED] = far ? -scale * unit : scale * unit;
            }
        }
        float sums[2];
        Vec<T, 2>{lows}.unpack(sums);
        if (__any_sync(0xffffffffu, !(fabsf(sums[0]) < INFINITY && fabsf(sums[1]) < INFINITY)) && part == 0) {
#pragma unroll 1
            for (int i = 0; i < TILE; i += COPIED) scales[row + i] = -fabsf(scales[row + i]);
        }
    }

private:
    static constexpr int HALF = 4 * CHUNKS;

    // Computes the largest magnitude of each row; with FINITE, of its finite values. The shuffles of several rows are
    // interleaved to hide their latency.
    template <bool FINITE>
    static __device__ __forceinline__ void largest(const float (&x)[BATCH][8], float (&found)[BATCH]) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            found[i] = 0.0f;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float size = fabsf(x[i][e]);
                found[i] = !FINITE || size < INFINITY ? fmaxf(found[i], size) : found[i];
            }
        }
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                found[i] = fmaxf(found[i], __shfl_xor_sync(0xffffffffu, found[i], distance));
            }
        }
    }
};

// The work of a block, in one head: rows of tile i, and columns of tiles first .. last - 1.
struct Job {
    int i, first, last;
    long long head;
};

// Chooses the work of a block. Row i of tiles is divided into segments of `span` tiles and a remainder. Rows (m - 1)
// span to m span - 1 therefore have m segments each. Blocks run roughly in the order of their index:
//
//   groups of `together` heads, one after the other     the rows of K of a group fit in the L2 cache
//   within a group, the last rows of tiles first        the last rows have the most work
__device__ __forceinline__ Job choose_job(int T, int heads, int span, int together) {
    const int n = (T - 1) / TILE + 1, whole = n / span;
    const int segments = whole * (whole + 1) / 2 * span + n % span * (whole + 1);
    const int band = blockIdx.x / (together * segments), index = blockIdx.x - band * together * segments;
    const int side_by_side = min(together, heads - band * together);
    const int segment = segments - 1 - index / side_by_side;
    const int m = triangle_row(segment / span), rest = segment - m * (m + 1) / 2 * span;
    const int i = m * span + rest / (m + 1), first = rest % (m + 1) * span;
    return {i, first, min(first + span, i + 1), band * together + index % side_by_side};
}

typedef float Sums[2][FRAGS][4];  // [f][n][e]: column lane / 4 * 4 + 2 f + e / 2, row Queries::row() + n + 4 (e % 2)

// A warp's rows of Q. Fragment n holds 8 of these rows, in their order in shared memory.
struct Queries {
    unsigned hi[STEPS][FRAGS][2], lo[STEPS][FRAGS][2];

    __device__ __forceinline__ explicit Queries(const char* buffer) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        buffer += (8 * FRAGS * warp + lane % 8) * PITCH + lane / 8 % 2 * 16 + lane / 16 * PART;
#pragma unroll
        for (int n = 0; n < FRAGS; ++n) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const char* from = buffer + 8 * n * PITCH + 32 * s;
                load_matrices<false>(hi[s][n][0], hi[s][n][1], lo[s][n][0], lo[s][n][1], from);
            }
        }
    }

    // Returns the lane's first row. The lane holds rows row() + n + 4 e (e = 0, 1), as columns 2 t + e of fragment n,
    // with t = lane % 4.
    static __device__ __forceinline__ int row() {
        const int first = FRAGS * (threadIdx.x / 32);
        return first / 4 * 32 + first % 4 + threadIdx.x % 4 * 8;
    }

    // Multiplies the rows of Q by 32 rows of K, which are columns of out. The small products come first, because a
    // tensor core truncates its addends at the magnitude of the current sum. With HIGH, only the products of hi are
    // computed.
    template <bool HIGH>
    __device__ __forceinline__ void multiply(Sums& sums, const char* rows) const {
        const int lane = threadIdx.x % 32;
        rows += lane % 16 * PITCH + lane / 16 * 16;
        unsigned high[STEPS][2][4];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            unsigned low[2][4];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                const char* at = rows + 16 * f * PITCH + 32 * s;
                load_matrices<false>(high[s][f][0], high[s][f][1], high[s][f][2], high[s][f][3], at);
                if (!HIGH) load_matrices<false>(low[f][0], low[f][1], low[f][2], low[f][3], at + PART);
            }
            if (HIGH) continue;
            add(sums, high[s], lo[s]);
            add(sums, low, hi[s]);
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) add(sums, high[s], hi[s]);
    }

    // Replaces sums that are infinite or NaN by the sums of products hi hi alone, without infinity times lo.
    __device__ __forceinline__ void mend(Sums& sums, const char* rows) const {
        Sums high = {};
        multiply<true>(high, rows);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
#pragma unroll
            for (int n = 0; n < FRAGS; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (!(fabsf(sums[f][n][e]) < INFINITY)) sums[f][n][e] = high[f][n][e];
                }
            }
        }
    }

private:
    static __device__ __forceinline__ void add(Sums& sums, const unsigned (&k)[2][4], const unsigned (&q)[FRAGS][2]) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
#pragma unroll
            for (int n = 0; n < FRAGS; ++n) mma(sums[f][n], k[f], q[n]);
        }
    }
};

struct alignas(16) Four {
    float v[4];
};

// Stores the values that lie on or below the diagonal; v[last] lies on the diagonal. With `vectors`, every row of out
// is aligned to 16 bytes, and the vector that contains the diagonal is stored whole.
__device__ __forceinline__ void store(float* to, const float (&v)[4], int last, bool vectors) {
    if (vectors) {
        if (last >= 0) __stcs(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (last >= e) to[e] = v[e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, TRI_BLOCKS) matmul_tri6(
    const float* __restrict__ qkv,  // (B, T, 3, NH, HS)
    float* __restrict__ out,        // (B, NH, T, T)
    int T,
    int heads,       // B NH
    int span,        // tiles of K per block, at most
    int together) {  // heads whose blocks run at the same time
    extern __shared__ __align__(16) char shared[];
    const Share share;
    char* const of_q = shared + 2 * share.BUFFER;  // scales of Q, which are read after the memory of its rows is reused
    const Job job = choose_job(T, heads, span, together);
    const float* q = qkv + (job.head / NH * T + job.i * TILE) * ROW + job.head % NH * HS;
    const float* k = qkv + (job.head / NH * T + job.first * TILE) * ROW + (NH + job.head % NH) * HS;
    share.copy(shared + share.BUFFER, q, T - job.i * TILE);
    end_group();
    share.copy(shared, k, T - job.first * TILE);
    end_group();
    wait_for_groups<1>();
    share.split(shared + share.BUFFER, of_q, 1.0f / sqrtf((float)HS));
    __syncthreads();  // the rows of Q are complete
    const Queries queries(shared + share.BUFFER);
    const int row = queries.row(), column = threadIdx.x % 32 / 4 * 4;
    const float* of_rows = reinterpret_cast<const float*>(of_q) + row;
    bool care = false;
#pragma unroll
    for (int n = 0; n < FRAGS; ++n) care |= fminf(of_rows[n], of_rows[n + 4]) < 0.0f;
    const bool all_there = T % 4 == 0 && (job.i + 1) * TILE <= T;
    float* to = out + (job.head * T + job.i * TILE + row) * T + job.first * TILE + column;

    int at_here = 0;
#pragma unroll 1
    for (int j = job.first; j < job.last; ++j, at_here = share.BUFFER - at_here) {
        char* const here = shared + at_here;
        wait_for_groups<0>();
        share.split(here, here + share.SCALES, 1.0f);
        __syncthreads();  // the tile is complete; no thread still reads the previous tile or the rows of Q
        if (j + 1 < job.last) {
            k += TILE * ROW;
            share.copy(shared + share.BUFFER - at_here, k, T - (j + 1) * TILE);
        }
        end_group();
#pragma unroll 1
        for (int c = 0; c < TILE; c += 32, to += 32) {
            const int below = (job.i - j) * TILE + row / 32 * 32 - c;  // 0: the diagonal crosses these columns
            if (below < 0) continue;
            Sums sums = {};
            queries.multiply<false>(sums, here + c * PITCH);
            const Four of_columns = *reinterpret_cast<const Four*>(here + share.SCALES + 4 * (c + column));
            const float* of_c = of_columns.v;
            const bool odd = care || fminf(fminf(of_c[0], of_c[1]), fminf(of_c[2], of_c[3])) < 0.0f;
            float* at = to;
            if (below > 0 && all_there && !__any_sync(0xffffffffu, odd)) {
#pragma unroll
                for (int r = 0; r < 8; ++r, at += T) {
                    const int e = r / 4, n = r % 4;
                    if (n >= FRAGS) continue;
                    const float s = of_rows[r];
                    __stcs(reinterpret_cast<float4*>(at),
                           make_float4(sums[0][n][e] * (s * of_c[0]), sums[0][n][e + 2] * (s * of_c[1]),
                                       sums[1][n][e] * (s * of_c[2]), sums[1][n][e + 2] * (s * of_c[3])));
                }
                continue;
            }
            if (__any_sync(0xffffffffu, odd)) queries.mend(sums, here + c * PITCH);
            const int last = (job.i - j) * TILE + row - c - column, left = T - job.i * TILE - row;
#pragma unroll
            for (int r = 0; r < 8; ++r, at += T) {
                const int e = r / 4, n = r % 4;
                if (n >= FRAGS) continue;
                const float s = fabsf(of_rows[r]);
                float v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // smaller scale first: overflows only if the result does
                    const float other = fabsf(of_c[i]);
                    v[i] = sums[i / 2][n][i % 2 * 2 + e] * fminf(s, other) * fmaxf(s, other);
                }
                store(at, v, r < left ? last + r : -1, T % 4 == 0);
            }
        }
    }
}
