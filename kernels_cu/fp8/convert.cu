// Conversion of 16-bit and 32-bit numbers to FP8: out = fp8(x), or fp8(x / scale) with one scale per output channel of
// a weight matrix. The scales are computed from the largest magnitudes (fp8/absmax.cu).
//
// The format is E5M2 (1 sign, 5 exponent, 2 fraction bits; a truncated __half) or, with WEIGHT_E4M3, E4M3FN (no
// infinity, largest number 448). A number is rounded once, to nearest even, by one addition of floats (lib/fp8.cuh):
// the result is the same on every architecture and for every type T of x.
//
//   to_fp8_kernel (element): one thread per element. FP8_WIDTH and FP8_VECTORS are 1
//   to_fp8_kernel (vectors): 16 elements per thread, 16-byte loads, all in flight at once. A vector is
//       FP8_WIDTH elements; x and out, and with FP8_SCALE each of their rows, are aligned to the bytes of a vector
//
// Neighbouring threads read neighbouring addresses.
//
// grid (ceil(size / (block * FP8_WIDTH * FP8_VECTORS))), block (any)
#if !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define WEIGHT_E5M2
#endif
#include "lib/storage.cuh"

#ifndef FP8_WIDTH  // elements per load: a power of two, at most 16 bytes
#define FP8_WIDTH 4
#endif
#ifndef FP8_VECTORS  // loads per thread
#define FP8_VECTORS 4
#endif
#ifndef FP8_SATURATE  // 1: larger numbers become the largest FP8 number; 0: infinity (E5M2) or NaN (E4M3)
#define FP8_SATURATE 1
#endif
#ifndef FP8_SCALE  // 0: no scale; one scale per output channel: 1 for x (K, N), 2 for x (N, K)
#define FP8_SCALE 0
#endif

constexpr float MAX_MAGNITUDE = FP8_SATURATE ? W::LARGEST : W::BEYOND;

// Returns the FP8 number for a magnitude, in the lowest 7 bits, without a sign.
__device__ __forceinline__ unsigned encode(float magnitude) { return encode_fp8<W>(magnitude, MAX_MAGNITUDE); }

// Returns the lower two bytes of `first`, then the lower two bytes of `second`.
__device__ __forceinline__ unsigned in_order(unsigned first, unsigned second) {
    return __byte_perm(first, second, 0x5410);
}

// Returns the last bytes, which hold the signs, of four elements of T, the lowest element first.
__device__ __forceinline__ unsigned last_bytes(const unsigned* words) {
    if constexpr (sizeof(T) == 2) return __byte_perm(words[0], words[1], 0x7531);
    else return in_order(__byte_perm(words[0], words[1], 0x73), __byte_perm(words[2], words[3], 0x73));
}

// Converts x[at .. at + COUNT) to out. With FP8_SCALE, these elements lie in one row of `inner` elements.
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
    // The sign comes from the last byte of the element itself, because widening may lose the sign of a NaN.
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

// Launched by operation (variant): to_fp8 (element), to_fp8 (vectors)
extern "C" __global__ void __launch_bounds__(1024, 1) to_fp8_kernel(
    const T* __restrict__ x,          // (size)
    const float* __restrict__ scale,  // (N), or null without FP8_SCALE
    unsigned char* __restrict__ out,  // (size)
    long long size, long long inner) {  // inner: elements per row of x: N or K
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
        } else {  // at the end of x: less than a vector is left, or nothing
#pragma unroll 1
            for (long long j = at; j < size; ++j) convert<1>(Vec<T, 1>::load(x + j), scale, out, j, inner);
        }
    }
}
