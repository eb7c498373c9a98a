// RMSNorm of the residual stream of a model: out = x * r * weight, r = 1 / sqrt(mean(x^2) + eps), over each row.
//
//   x (M, C) float, weight (C) float, out (M, C) of type T: float for decoding, 16 bits for products on tensor cores.
//   With RS_OPERAND, out holds each value as 16-bit terms (lib/operands.cuh), for the products of decoding
//
//   rmsnorm_stream: for the float32 rows of a model: a row has the same bits in any batch, out in any dtype,
//       overlapping launches
//   rmsnorm_sums: rmsnorm_stream of x plus the output of a feed-forward, which is stored as RS_SUMS partial sums. The
//       kernels of gated_sums, such as matmul/decode/ffn_mma.cu, have stored these sums, one for each part of the inner
//       dimension
//   rmsnorm_add: adds the norm of x to the residual stream, in place: out = residual + x * r * weight
//   rmsnorm_add_scaled: rmsnorm_add, then a multiplication of the sum by one number, which is in device memory
//   rmsnorm_gathered: for a model on several GPUs, each of which has computed some columns of x: gathers x, adds it to
//       the residual stream, in place, and normalizes the stream; the same bits as peers/all_gather.cu followed by
//       rmsnorm_stream; only for rows that threads keep in registers
//   operand_rows: x itself without a norm, in the formats of rmsnorm_stream, for products that read the residual stream
//   operand_columns: operand_rows with the channels in another order, that of the inputs of a matrix
//   operand_columns_narrow: operand_columns of x of type T
//
// Differences from norms/rmsnorm.cu: the order of additions depends only on C; x is float for every dtype of out; and
// the weights are loaded before the previous kernel has ended (lib/overlap.cuh).
//
// One block per row. Each thread keeps its part of the row in registers, if it takes at most MAX_HELD loads; longer
// rows are read again from the L2 cache. x and weight are aligned to RS_WIDTH floats, out to RS_WIDTH elements. Grid
// (M), block (RS_THREADS). operand_rows, operand_columns*: grid (M, LOADS), a load for each thread.
#include "lib/common.cuh"
#include "lib/exchange.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/rows.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"  // includes lib/operands.cuh
#include "lib/split_sums.cuh"

#ifndef RS_C
#define RS_C 4096
#endif
#ifndef RS_WIDTH  // values per load: gcd(4, RS_C)
#define RS_WIDTH 4
#endif
#ifndef RS_THREADS  // threads per block: a multiple of 32
#define RS_THREADS 256
#endif
#ifndef RS_OPERAND  // format of out: a kind of terms (16-bit parts of floats, lib/operands.cuh); 0: no terms
#define RS_OPERAND 0
#endif
#ifndef RS_SUMS  // rmsnorm_sums: partial sums per output of the feed-forward
#define RS_SUMS 1
#endif

constexpr int STEP = RS_THREADS * RS_WIDTH;
constexpr int LOADS = (RS_C + STEP - 1) / STEP;  // loads per thread
constexpr int MAX_HELD = 8;  // maximum number of loads that a thread keeps in registers
constexpr bool HELD = LOADS <= MAX_HELD;
typedef Vec<float, RS_WIDTH> Values;
static_assert(!RS_OPERAND || RS_WIDTH % 2 == 0, "a thread has whole pairs");
static_assert(!OPERAND_SUMS || RS_C % 128 == 0, "a warp has whole chunks");

// Calls use(i, c) for each of the thread's loads: i: index of the load, c: its first channel.
template <typename Use>
__device__ __forceinline__ void each_load(Use use) {
#pragma unroll(HELD ? LOADS : 1)
    for (int i = 0; i < LOADS; ++i) {
        const int c = i * STEP + threadIdx.x * RS_WIDTH;
        if ((i + 1) * STEP <= RS_C || c < RS_C) use(HELD ? i : 0, c);
    }
}

// Stores values of the block's row, starting at channel c, or their 16-bit terms. `out_scale`: scale that is used if
// RS_OPERAND selects hi/lo terms.
__device__ __forceinline__ void store(T* out, float out_scale, int c, const float (&v)[RS_WIDTH]) {
    store_row<RS_OPERAND>(out, out_scale, blockIdx.x, c, gridDim.x, RS_C, v);
}

// Normalises the block's row, unless before(), which runs when the previous kernel has ended, returns false. read(i, c)
// returns the values of load i, which start at channel c; write(c, v) receives the normalised values.
template <typename Before, typename Read, typename Write>
__device__ __forceinline__ void normalize(const float* weight, float eps, Before before, Read read, Write write) {
    __shared__ float scratch[RS_THREADS / 32];
    Values rows[HELD ? LOADS : 1], weights[HELD ? LOADS : 1];
    if (HELD) each_load([&](int i, int c) { weights[i] = load_parameters<RS_WIDTH>(weight + c); });
    let_next_start();
    wait_for_previous();
    if (!before()) return;
    if (HELD) each_load([&](int i, int c) { rows[i] = read(i, c); });

    float square = 0.0f;
    each_load([&](int i, int c) {
        float v[RS_WIDTH];
        (HELD ? rows[i] : read(i, c)).unpack(v);
#pragma unroll
        for (int e = 0; e < RS_WIDTH; ++e) square += v[e] * v[e];
    });
    const float r = rsqrtf(Team<RS_THREADS, 1>::sum(square, scratch) * (1.0f / RS_C) + eps);

    each_load([&](int i, int c) {
        float v[RS_WIDTH], w[RS_WIDTH];
        (HELD ? rows[i] : read(i, c)).unpack(v);
        (HELD ? weights[i] : Values::load(weight + c)).unpack(w);
#pragma unroll
        for (int e = 0; e < RS_WIDTH; ++e) v[e] *= r * w[e];
        write(c, v);
    });
}

__device__ __forceinline__ bool always() { return true; }

// Launched by operation (variant): rmsnorm (stream)
extern "C" __global__ void __launch_bounds__(RS_THREADS) rmsnorm_stream(
    const float* x,                    // (M, C)
    const float* __restrict__ weight,  // (C)
    T* out,                            // (M, C)
    float out_scale,                   // scale of out, used if RS_OPERAND selects hi/lo terms
    float eps) {
    const float* from = x + (long long)blockIdx.x * RS_C;
    normalize(weight, eps, always, [&](int, int c) { return load_fresh<float, RS_WIDTH>(from + c); },
              [&](int c, const float (&v)[RS_WIDTH]) { store(out, out_scale, c, v); });
}

// Stores change(sum) for each sum of residual and the norm of x.
template <typename Change>
__device__ __forceinline__ void add_norm(
    const float* x, const float* weight, const float* residual, float* out, float eps, Change change) {
    const long long row = (long long)blockIdx.x * RS_C;
    const auto read = [&](int, int c) { return load_fresh<float, RS_WIDTH>(x + row + c); };
    normalize(weight, eps, always, read,
              [&](int c, float (&v)[RS_WIDTH]) {
                  float old[RS_WIDTH];
                  load_fresh<float, RS_WIDTH>(residual + row + c).unpack(old);
#pragma unroll
                  for (int e = 0; e < RS_WIDTH; ++e) v[e] = change(v[e] + old[e]);
                  Values::store(out + row + c, v);
              });
}

// Launched by operation (variant): rmsnorm_add (add), rmsnorm_groups (groups)
extern "C" __global__ void __launch_bounds__(RS_THREADS) rmsnorm_add(
    const float* x,                    // (M, C)
    const float* __restrict__ weight,  // (C)
    const float* residual,             // (M, C)
    float* out,                        // (M, C); may be residual
    float eps) {
    add_norm(x, weight, residual, out, eps, [](float sum) { return sum; });
}

// Launched by operation (variant): rmsnorm_add (add)
extern "C" __global__ void __launch_bounds__(RS_THREADS) rmsnorm_add_scaled(
    const float* x,                    // (M, C)
    const float* __restrict__ weight,  // (C)
    const float* residual,             // (M, C)
    const float* __restrict__ scale,   // (1)
    float* out,                        // (M, C); may be residual
    float eps) {
    const float by = *scale;
    add_norm(x, weight, residual, out, eps, [&](float sum) { return __fmul_rn(sum, by); });
}

// Launched by operation (variant): operand (operand)
extern "C" __global__ void __launch_bounds__(RS_THREADS) operand_rows(
    const float* x,   // (M, C)
    T* out,           // (M, C)
    float out_scale)  // scale of out, used if RS_OPERAND selects hi/lo terms
{
    let_next_start();
    wait_for_previous();
    const int c = blockIdx.y * STEP + threadIdx.x * RS_WIDTH;
    if (c >= RS_C) return;
    float v[RS_WIDTH];
    load_fresh<float, RS_WIDTH>(x + (long long)blockIdx.x * RS_C + c).unpack(v);
    store(out, out_scale, c, v);
}

// Stores a load of the block's row, whose channel c is channel channels[c] of x.
template <typename E>
__device__ __forceinline__ void store_columns(const E* x, const int* channels, T* out, float out_scale) {
    let_next_start();
    wait_for_previous();
    const int c = blockIdx.y * STEP + threadIdx.x * RS_WIDTH;
    if (c >= RS_C) return;
    float v[RS_WIDTH];
#pragma unroll
    for (int e = 0; e < RS_WIDTH; ++e) {
        float one[1];
        load_fresh<E, 1>(x + (long long)blockIdx.x * RS_C + __ldg(channels + c + e)).unpack(one);
        v[e] = one[0];
    }
    store(out, out_scale, c, v);
}

// Launched by operation (variant): operand (operand)
extern "C" __global__ void __launch_bounds__(RS_THREADS) operand_columns(
    const float* x,                    // (M, C)
    const int* __restrict__ channels,  // (C): channel of x of each channel of out
    T* out,                            // (M, C)
    float out_scale)                   // scale of out, used if RS_OPERAND selects hi/lo terms
{
    store_columns(x, channels, out, out_scale);
}

// Launched by operation (variant): operand (operand)
extern "C" __global__ void __launch_bounds__(RS_THREADS) operand_columns_narrow(
    const T* x,                        // (M, C)
    const int* __restrict__ channels,  // (C): channel of x of each channel of out
    T* out,                            // (M, C)
    float out_scale)                   // not used: out has the type of x
{
    store_columns(x, channels, out, out_scale);
}

// Launched by operation (variant): rmsnorm_sums (sums)
extern "C" __global__ void __launch_bounds__(RS_THREADS) rmsnorm_sums(
    const float* x,                       // (M, C)
    const float* __restrict__ weight,     // (C)
    const float* sums,                    // (RS_SUMS, M, C)
    const float* __restrict__ sum_scale,  // (C): factors of the sums, or null
    T* out,                               // (M, C)
    float eps) {
    const long long row = (long long)blockIdx.x * RS_C, values = (long long)gridDim.x * RS_C;
    const auto read = [&](int, int c) {
        SplitSums<RS_SUMS, RS_WIDTH> added;
        float v[RS_WIDTH];
        load_fresh<float, RS_WIDTH>(x + row + c).unpack(v);
        added.load(sums + row + c, values, sum_scale ? sum_scale + c : nullptr);
#pragma unroll
        for (int e = 0; e < RS_WIDTH; ++e) v[e] = added.added_to(v[e], e);
        return Values::pack(v);
    };
    normalize(weight, eps, always, read, [&](int c, const float (&v)[RS_WIDTH]) { store(out, 1.0f, c, v); });
}

// Launched by operation (variant): all_gather_norm (normed)
extern "C" __global__ void __launch_bounds__(RS_THREADS) rmsnorm_gathered(
    const float* shard,                // (M, S): this GPU's columns of x
    float* stream,                     // (M, C): the residual stream
    const float* __restrict__ weight,  // (C)
    T* out,                            // (M, C)
    float out_scale,                   // scale of out, used if RS_OPERAND selects hi/lo terms
    float eps,
    int* abort,  // abort and the next arguments: see peers/all_gather.cu
    long long* own,
    long long* to_1, long long* to_2, long long* to_3, long long* to_4, long long* to_5, long long* to_6,
    long long* to_7,
    int S,
    int first,
    int capacity,
    int parts) {
    const long long row = (long long)blockIdx.x * RS_C;
    Values old[HELD ? LOADS : 1];
    unsigned words[HELD ? LOADS : 1][RS_WIDTH], round = 0;
    const auto exchange = [&] {
        long long* const others[MAX_OTHERS] = {to_1, to_2, to_3, to_4, to_5, to_6, to_7};
        round = next_round(own);
        const long long half = first_entry(round, capacity) + row;
        const float* const from = shard + (long long)blockIdx.x * S - first;
        const auto mine = [&](int c) { return c >= first && c < first + S; };
        each_load([&](int i, int c) {  // all loads come before the first store: the block waits for memory once
            old[i] = load_fresh<float, RS_WIDTH>(stream + row + c);
            float v[RS_WIDTH] = {};
            if (mine(c)) load_fresh<float, RS_WIDTH>(from + c).unpack(v);
#pragma unroll
            for (int e = 0; e < RS_WIDTH; ++e) words[i][e] = __float_as_uint(v[e]);
        });
#pragma unroll
        for (int g = 0; (parts & TO_PEERS) && g < OTHERS; ++g) {
            each_load([&](int i, int c) {
#pragma unroll
                for (int e = 0; e + 1 < RS_WIDTH; e += 2)
                    if (mine(c)) store_words<2>(others[g] + half + c + e, &words[i][e], round);
            });
        }
        if (!(parts & FROM_PEERS)) return false;
        store_round(own, round);
        const long long begun = clock64();
        bool all = false;
        for (int polls = 1; !all && !gives_up(polls, abort, begun); ++polls) {
            all = true;
            each_load([&](int i, int c) {
#pragma unroll
                for (int e = 0; e + 1 < RS_WIDTH; e += 2)
                    if (!mine(c)) all &= receive<2>(own + half + c + e, &words[i][e], round);
            });
        }
        return true;
    };
    const auto read = [&](int i, int c) {
        float v[RS_WIDTH];
        old[i].unpack(v);
#pragma unroll
        for (int e = 0; e < RS_WIDTH; ++e) v[e] += __uint_as_float(words[i][e]);
        Values::store(stream + row + c, v);
        return Values::pack(v);
    };
    normalize(weight, eps, exchange, read, [&](int c, const float (&v)[RS_WIDTH]) { store(out, out_scale, c, v); });
}
