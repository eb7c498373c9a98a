// Conversion of 16-bit and 32-bit numbers to FP8, and the largest magnitudes from which scales are computed.
//
//   to_fp8_kernel      out = fp8(x), or fp8(x / scale) with one scale per output channel of a weight matrix
//   absmax_kn_kernel   absmax[n] = max over k of |w[k][n]|, w (K, N): along the columns
//   absmax_nk_kernel   absmax[n] = max over k of |w[n][k]|, w (N, K): along the rows
//
// The format is E5M2 (1 sign, 5 exponent, 2 fraction bits; a truncated __half) or, with WEIGHT_E4M3, E4M3FN (no
// infinity, largest number 448). Rounding is to nearest even, once, by one addition of floats (lib/fp8.cuh): the result
// is the same on every architecture and for every T.
//
// to_fp8_kernel: grid (ceil(size / (block * FP8_WIDTH * FP8_VECTORS))), any block. Neighbouring threads read
// neighbouring addresses, and a thread issues all its loads before it converts the first. FP8_WIDTH 1 is the simple
// variant, one element per load. Wider loads need arrays aligned to a vector; with FP8_SCALE and for absmax, each row
// as well.
// absmax_kn_kernel: grid (ceil(N / (FP8_LANES * FP8_WIDTH))), absmax_nk_kernel: grid (N); block (FP8_BLOCK).
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#include "lib/common.cuh"
#include "lib/storage.cuh"

#ifndef FP8_WIDTH  // elements per load: a power of two, at most 16 bytes
#define FP8_WIDTH 4
#endif
#ifndef FP8_VECTORS  // loads per thread
#define FP8_VECTORS 4
#endif
#ifndef FP8_SATURATE  // numbers beyond the largest one become: 1 that number, 0 infinity (E5M2) or NaN (E4M3)
#define FP8_SATURATE 1
#endif
#ifndef FP8_SCALE  // scales: 0 none; one per output channel, 1 of (K, N), 2 of (N, K)
#define FP8_SCALE 0
#endif
#ifndef FP8_BLOCK  // threads of the absmax kernels
#define FP8_BLOCK 512
#endif
#ifndef FP8_LANES  // neighbouring threads of absmax_kn_kernel that share a row
#define FP8_LANES 4
#endif

constexpr unsigned EXPONENT = 0x7f800000;  // mask of a float's exponent
constexpr float MOST = FP8_SATURATE ? W::LARGEST : W::BEYOND;

// Returns the byte without its sign, in the lowest 7 bits.
__device__ __forceinline__ unsigned encode(float magnitude) { return encode_fp8<W>(magnitude, MOST); }

// The lower two bytes of `first` and of `second`.
__device__ __forceinline__ unsigned in_order(unsigned first, unsigned second) {
    return __byte_perm(first, second, 0x5410);
}

// The last bytes, which hold the signs, of four elements of T, lowest first.
__device__ __forceinline__ unsigned last_bytes(const unsigned* words) {
    if constexpr (sizeof(T) == 2) return __byte_perm(words[0], words[1], 0x7531);
    else return in_order(__byte_perm(words[0], words[1], 0x73), __byte_perm(words[2], words[3], 0x73));
}

// Converts x[at .. at + COUNT) to out. With a scale, these elements lie in one row of `inner` elements.
template <int COUNT>
__device__ __forceinline__ void convert(
    const Vec<T, COUNT>& vector, const float* scale, unsigned char* out, long long at, long long inner) {
    float v[COUNT];
    vector.unpack(v);
#if FP8_SCALE == 1
    constexpr int QUAD = COUNT < 4 ? COUNT : 4;
    scale += at % inner;
#pragma unroll
    for (int k = 0; k < COUNT; k += QUAD) {
        const Vec<float, QUAD> quad = Vec<float, QUAD>::load(scale + k);
        const float* s = reinterpret_cast<const float*>(&quad.raw);
#pragma unroll
        for (int j = 0; j < QUAD; ++j) v[k + j] /= s[j];
    }
#elif FP8_SCALE == 2
    const float s = __ldg(scale + at / inner);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) v[k] /= s;
#endif
    // The sign is taken from the last byte of the element itself, because widening may lose the sign of a NaN.
    typename Bits<COUNT>::type packed;
    if constexpr (COUNT % 4 == 0) {
        unsigned* words = reinterpret_cast<unsigned*>(&packed);
        const unsigned* raw = reinterpret_cast<const unsigned*>(&vector.raw);
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) {
            unsigned code[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) code[j] = encode(fabsf(v[k + j]));
            const unsigned codes = in_order(__byte_perm(code[0], code[1], 0x40), __byte_perm(code[2], code[3], 0x40));
            words[k / 4] = (codes & 0x7f7f7f7fu) | (last_bytes(raw + k * sizeof(T) / 4) & 0x80808080u);
        }
    } else {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(&packed);
        const unsigned char* last = reinterpret_cast<const unsigned char*>(&vector.raw) + sizeof(T) - 1;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) bytes[k] = (last[k * sizeof(T)] & 0x80u) | (encode(fabsf(v[k])) & 0x7fu);
    }
    *reinterpret_cast<typename Bits<COUNT>::type*>(out + at) = packed;
}

extern "C" __global__ void __launch_bounds__(1024, 1) to_fp8_kernel(
    const T* __restrict__ x,          // (size)
    const float* __restrict__ scale,  // (N) or, without FP8_SCALE, null
    unsigned char* __restrict__ out,  // (size)
    long long size, long long inner) {  // inner: N of (K, N), K of (N, K)
    const long long step = (long long)blockDim.x * FP8_WIDTH;
    const long long first = blockIdx.x * step * FP8_VECTORS + (long long)threadIdx.x * FP8_WIDTH;
    Vec<T, FP8_WIDTH> vector[FP8_VECTORS];
#pragma unroll
    for (int i = 0; i < FP8_VECTORS; ++i) {
        const long long at = first + i * step;
        if (at + FP8_WIDTH <= size) vector[i] = Vec<T, FP8_WIDTH>::load_once(x + at);
    }
#pragma unroll
    for (int i = 0; i < FP8_VECTORS; ++i) {
        const long long at = first + i * step;
        if (at + FP8_WIDTH <= size) {
            convert<FP8_WIDTH>(vector[i], scale, out, at, inner);
        } else {  // the remainder at the end, less than a vector, or nothing
#pragma unroll 1
            for (long long j = at; j < size; ++j) convert<1>(Vec<T, 1>::load(x + j), scale, out, j, inner);
        }
    }
}

// Updates most[] with the magnitudes of a vector, compared as integers: NaN and infinity are the largest.
__device__ __forceinline__ void take_larger(int (&most)[FP8_WIDTH], const T* from) {
    float v[FP8_WIDTH];
    Vec<T, FP8_WIDTH>::load_once(from).unpack(v);
#pragma unroll
    for (int k = 0; k < FP8_WIDTH; ++k) most[k] = max(most[k], __float_as_int(v[k]) & 0x7fffffff);
}

// As a float, with NaN replaced by infinity, so that the maximum of floats reports both.
__device__ __forceinline__ float finished(int most) { return __int_as_float(min(most, (int)EXPONENT)); }

extern "C" __global__ void __launch_bounds__(FP8_BLOCK) absmax_kn_kernel(
    const T* __restrict__ w,     // (K, N)
    float* __restrict__ absmax,  // (N), infinity if a channel contains infinity or NaN
    int K, int N) {
    constexpr int COLUMNS = FP8_LANES * FP8_WIDTH, GROUPS = FP8_BLOCK / FP8_LANES;
    __shared__ float scratch[GROUPS][COLUMNS];
    const int lane = threadIdx.x % FP8_LANES, group = threadIdx.x / FP8_LANES;
    const long long n = (long long)blockIdx.x * COLUMNS + lane * FP8_WIDTH;
    int most[FP8_WIDTH] = {};
    if (n < N) {
        const T* column = w + n;
#pragma unroll 4
        for (int k = group; k < K; k += GROUPS) take_larger(most, column + (long long)k * N);
    }
#pragma unroll
    for (int j = 0; j < FP8_WIDTH; ++j) scratch[group][lane * FP8_WIDTH + j] = finished(most[j]);
    __syncthreads();

    const int column = threadIdx.x;
    if (column >= COLUMNS || (long long)blockIdx.x * COLUMNS + column >= N) return;
    float largest = 0.0f;
    for (int g = 0; g < GROUPS; ++g) largest = fmaxf(largest, scratch[g][column]);
    absmax[blockIdx.x * COLUMNS + column] = largest;
}

extern "C" __global__ void __launch_bounds__(FP8_BLOCK) absmax_nk_kernel(
    const T* __restrict__ w,     // (N, K)
    float* __restrict__ absmax,  // (N), infinity if a channel contains infinity or NaN
    int K) {
    __shared__ float scratch[FP8_BLOCK];
    const T* row = w + (long long)blockIdx.x * K;
    int most[FP8_WIDTH] = {};
#pragma unroll 4
    for (long long k = threadIdx.x * FP8_WIDTH; k < K; k += FP8_BLOCK * FP8_WIDTH) take_larger(most, row + k);
    int all = 0;
#pragma unroll
    for (int j = 0; j < FP8_WIDTH; ++j) all = max(all, most[j]);
    const float largest = block_reduce_max<FP8_BLOCK>(finished(all), scratch);
    if (threadIdx.x == 0) absmax[blockIdx.x] = largest;
}
