// The product of a few rows of x with weights W, which reads W once. With only two operations per weight and row the
// product is memory-bound, so loads of weights must never pause.
//
// Each thread issues its loads of x, and immediately afterwards loads of its first MV_UNROLL vectors of weights. While
// these loads are in flight, x is written to shared memory. After a weight has been used, its register is the target of
// the next load at once. Columns are processed in pairs: the two columns that RoPE rotates together, or the same column
// of W1 and W3.
//
//   MV_NK 1   W (N, K): a column of the product is a row in memory; one warp computes a pair, its lanes along K
//   MV_NK 0   W (K, N): MV_LANES neighbouring threads read a strip of columns of one row of W, other threads the same
//             strip in other rows; the sums of all these threads are added in shared memory. MV_STRIPS 1: a block
//             processes one strip; pairs are neighbouring columns. MV_STRIPS 2: two strips; the columns of a
//             pair have the same position in the two strips
//
// A vector has MV_WIDTH weights; MV_WIDTH divides K (MV_NK 1) or N (MV_NK 0). A block processes MV_ROWS rows. If there
// are more rows, other blocks read W again, at best from the L2 cache.
#pragma once
#include "lib/common.cuh"
#include "lib/storage.cuh"
#include "lib/stream.cuh"

#ifndef MV_NK
#define MV_NK 1
#endif
#ifndef MV_ROWS
#define MV_ROWS 1
#endif
#ifndef MV_WIDTH
#define MV_WIDTH 4
#endif
#ifndef MV_X  // elements per load of x, residual and gamma; divides K
#define MV_X 4
#endif
#ifndef MV_UNROLL
#define MV_UNROLL 2
#endif
#ifndef MV_THREADS
#define MV_THREADS 256
#endif
#ifndef MV_LANES
#define MV_LANES 4
#endif
#ifndef MV_STRIPS
#define MV_STRIPS 2
#endif

constexpr int WARPS = MV_THREADS / 32;
typedef Vec<W, MV_WIDTH> Weights;

#if MV_NK
constexpr int STREAMS = 2;              // vectors of weights that are multiplied by the same part of x
constexpr int STEP = 32 * MV_WIDTH;     // values along K per step of a warp
constexpr int PAIRS = WARPS;            // pairs of columns per block
#else
constexpr int STREAMS = MV_STRIPS;
constexpr int STEP = MV_THREADS / MV_LANES;  // values along K per step of a block
constexpr int STRIP = MV_LANES * MV_WIDTH;   // columns per strip
constexpr int PAIRS = MV_STRIPS == 2 ? STRIP : STRIP / 2;
static_assert(MV_STRIPS == 2 || STRIP % 2 == 0, "the pairs of one strip are neighbouring columns");
#endif

// Returns the position of x[k] in shared memory. With W as (N, K), a lane reads its MV_WIDTH consecutive values as
// several float4. The first float4 of all lanes are stored next to each other, then the second float4 of all lanes,
// which avoids bank conflicts.
__device__ __forceinline__ int place(int k) {
    if (!MV_NK || MV_WIDTH <= 4) return k;
    const int within = k % STEP, lane = within / MV_WIDTH, e = within % MV_WIDTH;
    return k - within + e / 4 * 128 + lane * 4 + e % 4;
}

// Reads MV_WIDTH values of x from shared memory; x_s points to the lane's first value, which is stored at place(k).
__device__ __forceinline__ void read(const float* x_s, float (&x)[MV_WIDTH]) {
    if constexpr (MV_WIDTH < 4) {
#pragma unroll
        for (int e = 0; e < MV_WIDTH; ++e) x[e] = x_s[e];
    } else {
#pragma unroll
        for (int e = 0; e < MV_WIDTH; e += 4) {
            const float4 v = *reinterpret_cast<const float4*>(x_s + e / 4 * 128);
            x[e] = v.x, x[e + 1] = v.y, x[e + 2] = v.z, x[e + 3] = v.w;
        }
    }
}

// A thread's weights, prefetched MV_UNROLL steps ahead. k: the thread's first row of W (K, N), or its first position in
// a row of W (N, K).
struct Stream {
    Weights raw[STREAMS][MV_UNROLL];
    const W* from[STREAMS];
    const int K, k;
    const long long row;  // elements of W from one k to the next

    __device__ Stream(const W* first, const W* second, int K, int k, long long row) : K(K), k(k), row(row) {
        from[0] = first;
        if constexpr (STREAMS == 2) from[1] = second;
#pragma unroll
        for (int u = 0; u < MV_UNROLL; ++u) fetch(u, k + u * STEP);
    }

    __device__ __forceinline__ void fetch(int u, int at) {
        if (at >= K) return;
#pragma unroll
        for (int s = 0; s < STREAMS; ++s) raw[s][u] = stream_in<Weights>(from[s] + at * row);
    }

    template <typename Use>
    __device__ __forceinline__ void each(Use use) {  // calls use(k, weights of each stream)
        for (int base = k; base < K; base += MV_UNROLL * STEP) {
#pragma unroll
            for (int u = 0; u < MV_UNROLL; ++u) {
                const int at = base + u * STEP;
                if (at >= K) break;
                float w[STREAMS][MV_WIDTH];
#pragma unroll
                for (int s = 0; s < STREAMS; ++s) raw[s][u].unpack(w[s]);
                fetch(u, at + MV_UNROLL * STEP);
                use(at, w);
            }
        }
    }
};

// Writes MV_X values of x, starting with x[k], to their positions in shared memory. k is a multiple of MV_X.
__device__ __forceinline__ void write(const float (&v)[MV_X], int k, float* x_s) {
    if constexpr (MV_X < 4) {
#pragma unroll
        for (int e = 0; e < MV_X; ++e) x_s[place(k + e)] = v[e];
    } else {
#pragma unroll
        for (int e = 0; e < MV_X; e += 4) {
            *reinterpret_cast<float4*>(x_s + place(k + e)) = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
        }
    }
}

__device__ __forceinline__ int padded(int K) { return (K + STEP - 1) / STEP * STEP; }  // row length in shared memory

struct Rows {  // rows of x that a block multiplies
    const T* x;         // (M, K), rows x_stride apart
    const T* residual;  // (M, K) or null
    const T* gamma;     // (K), or null: no norm
    T* sum;             // (M, K): x + residual, an output for later kernels, or null
    long long x_stride;
    int M, K, first;

    __device__ float factor(const float* squares, float eps) const {  // RMSNorm factor; squares: a sum per warp
        if (!gamma) return 1.0f;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += squares[w];
        return rsqrtf(total / K + eps);
    }
};

// Two vectors of a row of x (and of residual and gamma) per thread: fetch() loads them into registers, put() later
// stores x * gamma in shared memory.
struct Part {
    static constexpr int VECTORS = 2;
    static constexpr int STRIDE = MV_THREADS * MV_X;
    typedef Vec<T, MV_X> Values;
    Values x[VECTORS], residual[VECTORS], gamma[VECTORS];

    __device__ void fetch(const Rows& rows, long long m, int k) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i, k += STRIDE) {
            if (k >= rows.K) return;
            x[i] = Values::load(rows.x + m * rows.x_stride + k);
            if (rows.residual) residual[i] = Values::load(rows.residual + m * rows.K + k);
            if (rows.gamma) gamma[i] = Values::load(rows.gamma + k);
        }
    }

    // Writes x * gamma to x_s and returns the sum of squares of x, where x includes the residual.
    __device__ float put(const Rows& rows, long long m, int k, float* x_s) const {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i, k += STRIDE) {
            if (k >= rows.K) break;
            float v[MV_X], other[MV_X];
            x[i].unpack(v);
            if (rows.residual) {
                residual[i].unpack(other);
#pragma unroll
                for (int e = 0; e < MV_X; ++e) v[e] = widen(narrow(v[e] + other[e]));
                if (rows.sum && blockIdx.x == 0) Values::store(rows.sum + m * rows.K + k, v);
            }
#pragma unroll
            for (int e = 0; e < MV_X; ++e) square += v[e] * v[e];
            if (rows.gamma) {
                gamma[i].unpack(other);
#pragma unroll
                for (int e = 0; e < MV_X; ++e) v[e] *= other[e];
            }
            write(v, k, x_s);
        }
        return square;
    }
};

// Writes x * gamma of the block's rows, and each warp's sum of squares of x, to shared memory. `part` already holds the
// thread's first vectors of row 0.
__device__ __forceinline__ void put_rows(const Rows& rows, Part& part, float* x_s, float (*squares)[WARPS]) {
#pragma unroll 1
    for (int r = 0; r < MV_ROWS; ++r) {
        const long long m = min(rows.first + r, rows.M - 1);
        float square = 0.0f;
        for (int k = threadIdx.x * MV_X; k < rows.K; k += Part::VECTORS * Part::STRIDE) {
            if (r > 0 || k >= Part::VECTORS * Part::STRIDE) part.fetch(rows, m, k);
            square += part.put(rows, m, k, x_s + r * padded(rows.K));
        }
        square = lanes_sum<32>(square);
        if (threadIdx.x % 32 == 0) squares[r][threadIdx.x / 32] = square;
    }
    __syncthreads();
}

// Computes both products of every pair of columns and every row of the block, without the row's RMSNorm factor.
// columns(pair) returns an int2 with the columns of a pair: x is a column of `first`, y of `second`. prepare(columns,
// row) creates an End while weights are in flight. The End is later called with both products.
template <typename End, typename Columns, typename Prepare>
__device__ __forceinline__ void multiply(const W* first, const W* second, const Rows& rows, int N, int pairs,
                                         float4* shared, float (*squares)[WARPS], Columns columns, Prepare prepare) {
    float* x_s = reinterpret_cast<float*>(shared);
    const int K = rows.K, lane = threadIdx.x % 32;
    Part part;
    part.fetch(rows, rows.first, threadIdx.x * MV_X);
#if MV_NK
    const int pair = blockIdx.x * PAIRS + threadIdx.x / 32;
    const int2 n = columns(min(pair, pairs - 1));
    const long long last = min(n.y, N - 1);  // if the number of columns is odd, the last column is paired with itself
    Stream stream(first + (long long)n.x * K, second + last * K, K, lane * MV_WIDTH, 1);
    const End end = prepare(n, min(lane, MV_ROWS - 1));
    put_rows(rows, part, x_s, squares);

    float sum[2][MV_ROWS] = {};
    stream.each([&](int k, const float (&w)[STREAMS][MV_WIDTH]) {
#pragma unroll
        for (int r = 0; r < MV_ROWS; ++r) {
            float x[MV_WIDTH];
            read(x_s + r * padded(K) + place(k), x);
#pragma unroll
            for (int e = 0; e < MV_WIDTH; ++e) {
                sum[0][r] += w[0][e] * x[e];
                sum[1][r] += w[1][e] * x[e];
            }
        }
    });
#pragma unroll
    for (int r = 0; r < MV_ROWS; ++r) {
        const float a = lanes_sum<32>(sum[0][r]), b = lanes_sum<32>(sum[1][r]);
        if (lane == r && pair < pairs) end(a, b);
    }
#else
    static_assert(PAIRS * MV_ROWS <= MV_THREADS, "a thread for every pair and row of the block");
    float* parts = x_s + MV_ROWS * padded(K);            // (WARPS, MV_ROWS, MV_STRIPS, STRIP)
    const int slot = threadIdx.x % MV_LANES * MV_WIDTH;  // column within the strip
    const int2 start = columns(blockIdx.x * PAIRS);      // first columns of the strips
    const bool inside = start.x + slot < N && (MV_STRIPS == 1 || start.y + slot < N);
    Stream stream(first + start.x + slot, second + start.y + slot, inside ? K : 0, threadIdx.x / MV_LANES, N);
    const int pair = threadIdx.x % PAIRS, row = threadIdx.x / PAIRS;  // the pair and row that this thread completes
    const End end = prepare(columns(min((int)blockIdx.x * PAIRS + pair, pairs - 1)), min(row, MV_ROWS - 1));
    put_rows(rows, part, x_s, squares);

    float sum[MV_STRIPS][MV_ROWS][MV_WIDTH] = {};
    stream.each([&](int k, const float (&w)[STREAMS][MV_WIDTH]) {
#pragma unroll
        for (int r = 0; r < MV_ROWS; ++r) {
            const float value = x_s[r * padded(K) + k];
#pragma unroll
            for (int s = 0; s < MV_STRIPS; ++s) {
#pragma unroll
                for (int e = 0; e < MV_WIDTH; ++e) sum[s][r][e] += w[s][e] * value;
            }
        }
    });
#pragma unroll
    for (int r = 0; r < MV_ROWS; ++r) {
#pragma unroll
        for (int s = 0; s < MV_STRIPS; ++s) {
            float* to = parts + ((threadIdx.x / 32 * MV_ROWS + r) * MV_STRIPS + s) * STRIP + slot;
#pragma unroll
            for (int e = 0; e < MV_WIDTH; ++e) {
                float value = sum[s][r][e];
#pragma unroll
                for (int distance = 16; distance >= MV_LANES; distance /= 2) {
                    value += __shfl_xor_sync(0xffffffffu, value, distance);
                }
                if (lane < MV_LANES) to[e] = value;
            }
        }
    }
    __syncthreads();
    if (row >= MV_ROWS || (int)blockIdx.x * PAIRS + pair >= pairs) return;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float* from = parts + (w * MV_ROWS + row) * MV_STRIPS * STRIP;
        a += from[MV_STRIPS == 2 ? pair : 2 * pair];
        b += from[MV_STRIPS == 2 ? STRIP + pair : 2 * pair + 1];
    }
    end(a, b);
#endif
}
