// Storage types: what the arrays of a kernel hold and how it is converted. Arithmetic is always float.
//
//   T   activations: float, or __half with STORAGE_FP16, or __nv_bfloat16 with STORAGE_BF16
//   W   weights:     T, or one byte of FP8 with WEIGHT_E5M2 or WEIGHT_E4M3
//
//   E5M2   sign, 5 exponent bits, 2 fraction bits: the upper byte of a __half
//   E4M3   sign, 4 exponent bits, 3 fraction bits: shifted by one bit, a __half that is 256 times too small. It has no
//          infinity. Its two NaN codes, 0x7f and 0xff, would be read as +-480; weights must not contain them
//
// Vec<E, WIDTH> moves WIDTH elements of type E in one instruction. WIDTH is a power of two, a vector has at most 16
// bytes and is aligned to its size.
#pragma once

__device__ __forceinline__ float widen(float value) { return value; }

#if defined(STORAGE_FP16) || defined(WEIGHT_E5M2) || defined(WEIGHT_E4M3)
#include <cuda_fp16.h>
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
#endif

#if defined(STORAGE_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 T;
__device__ __forceinline__ float widen(T value) { return __bfloat162float(value); }
__device__ __forceinline__ T narrow(float value) { return __float2bfloat16_rn(value); }
#elif defined(STORAGE_FP16)
typedef __half T;
__device__ __forceinline__ T narrow(float value) { return __float2half_rn(value); }
#else
typedef float T;
__device__ __forceinline__ T narrow(float value) { return value; }
#endif

#if defined(WEIGHT_E5M2) || defined(WEIGHT_E4M3)
struct Fp8 {
    unsigned char bits;
};
typedef Fp8 W;

__device__ __forceinline__ float widen(Fp8 value) {  // through __half, which represents subnormal FP8 numbers
#if defined(WEIGHT_E5M2)
    return widen(__ushort_as_half((unsigned short)(value.bits << 8)));
#else
    const unsigned short half = (unsigned short)((value.bits & 0x80u) << 8 | (value.bits & 0x7fu) << 7);
    return 256.0f * widen(__ushort_as_half(half));
#endif
}

// Converts four bytes, lowest first, in pairs: shifts and masks act on both halves of a register at once.
__device__ __forceinline__ void widen(unsigned bytes, float* v) {
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {
        unsigned halves;
#if defined(WEIGHT_E4M3) && __CUDA_ARCH__ >= 890  // sm_89 and newer have an instruction for it
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(bytes >> 8 * pair)));
        const float scale = 1.0f;
#else
        halves = __byte_perm(bytes, 0, pair ? 0x3424 : 0x1404);  // each byte becomes the upper byte of a half
#if defined(WEIGHT_E4M3)
        halves = (halves & 0x80008000u) | (halves >> 1 & 0x3f803f80u);
        const float scale = 256.0f;
#else
        const float scale = 1.0f;
#endif
#endif
        v[pair] = scale * widen(__ushort_as_half((unsigned short)halves));
        v[pair + 1] = scale * widen(__ushort_as_half((unsigned short)(halves >> 16)));
    }
}
#else
typedef T W;
#endif

__device__ __forceinline__ void narrow_to(float& to, float value) { to = value; }
template <typename E>
__device__ __forceinline__ void narrow_to(E& to, float value) { to = narrow(value); }

template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef unsigned char type; };
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef unsigned int type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };

template <typename E, int WIDTH>
struct Vec {
    static_assert((WIDTH & (WIDTH - 1)) == 0 && WIDTH * sizeof(E) <= 16, "a vector is a power of two, 16 bytes");
    typedef typename Bits<WIDTH * sizeof(E)>::type Raw;
    Raw raw;

    // Uses a built-in function, because the compiler may split a plain vector load into its elements.
    static __device__ __forceinline__ Vec load(const E* from) { return {__ldg(reinterpret_cast<const Raw*>(from))}; }

    // For data that is read only once: its cache lines are evicted first.
    static __device__ __forceinline__ Vec load_once(const E* from) {
        return {__ldcs(reinterpret_cast<const Raw*>(from))};
    }

    static __device__ __forceinline__ Vec pack(const float (&v)[WIDTH]) {
        Vec vector;
        E* elements = reinterpret_cast<E*>(&vector.raw);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) narrow_to(elements[k], v[k]);
        return vector;
    }

    static __device__ __forceinline__ void store(E* to, const float (&v)[WIDTH]) {
        *reinterpret_cast<Raw*>(to) = pack(v).raw;
    }

    static __device__ __forceinline__ void store_once(E* to, const float (&v)[WIDTH]) {  // not read again soon
        __stcs(reinterpret_cast<Raw*>(to), pack(v).raw);
    }

    __device__ __forceinline__ void unpack(float (&v)[WIDTH]) const {
        if constexpr (sizeof(E) == 1 && WIDTH % 4 == 0) {
            const unsigned* words = reinterpret_cast<const unsigned*>(&raw);
#pragma unroll
            for (int k = 0; k < WIDTH; k += 4) widen(words[k / 4], v + k);
        } else {
            const E* elements = reinterpret_cast<const E*>(&raw);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) v[k] = widen(elements[k]);
        }
    }
};
