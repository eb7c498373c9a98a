// Storage types: the element types of arrays, and conversions between them and float. Arithmetic is always float.
//
//   T    activations: float, or __half with STORAGE_FP16, or __nv_bfloat16 with STORAGE_BF16
//   W    weights:     T; or FP8 with WEIGHT_E5M2 or with WEIGHT_E4M3, which must not contain NaN; with WEIGHT_HI_LO,
//                     float16 parts of hi/lo numbers (lib/hi_lo.cuh), all high parts before all low parts; with
//                     WEIGHT_GGUF, the bytes of GGUF blocks (lib/gguf.cuh)
//   KV   keys and values of a kv_cache: T, or FP8 with CACHE_E5M2 or CACHE_E4M3
//
// W and KV can be different FP8 formats (lib/fp8.cuh). Values stored as KV are rounded to nearest even; magnitudes
// larger than the largest finite FP8 number become this number.
//
// Vec<E, WIDTH> loads or stores WIDTH elements of type E in one instruction. WIDTH is a power of two. A vector has at
// most 16 bytes and is aligned to its size.
#pragma once

__device__ __forceinline__ float widen(float value) { return value; }

#if defined(STORAGE_FP16)
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

#if defined(WEIGHT_E5M2) || defined(WEIGHT_E4M3) || defined(CACHE_E5M2) || defined(CACHE_E4M3)
#include "lib/fp8.cuh"
#endif

#if defined(WEIGHT_E5M2)
typedef E5M2 W;
#elif defined(WEIGHT_E4M3)
typedef FiniteE4M3 W;
#elif defined(WEIGHT_HI_LO)
struct Part { unsigned short bits; };  // high or low part: a float16 number
typedef Part W;
#elif defined(WEIGHT_GGUF)
struct Byte { unsigned char bits; };
typedef Byte W;
#else
typedef T W;
#endif

#if defined(CACHE_E5M2)
typedef E5M2 KV;
#elif defined(CACHE_E4M3)
typedef E4M3 KV;
#else
typedef T KV;
#endif

// Rounds a float to the storage type E, which is T, W or KV.
template <typename E>
__device__ __forceinline__ E narrowed(float value) {
    if constexpr (sizeof(E) == 1) return E::narrow(value);
    else return narrow(value);
}

__device__ __forceinline__ void narrow_to(float& to, float value) { to = value; }
template <typename E>
__device__ __forceinline__ void narrow_to(E& to, float value) { to = narrowed<E>(value); }

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

    // Loads a vector with a built-in function: the compiler may split a plain vector load into loads of elements.
    static __device__ __forceinline__ Vec load(const E* from) { return {__ldg(reinterpret_cast<const Raw*>(from))}; }

    // Loads data that is read only once: its cache lines are evicted first.
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

    static __device__ __forceinline__ void store_once(E* to, const float (&v)[WIDTH]) {  // data not read again soon
        __stcs(reinterpret_cast<Raw*>(to), pack(v).raw);
    }

    __device__ __forceinline__ void unpack(float (&v)[WIDTH]) const {
        if constexpr (sizeof(E) == 1 && WIDTH % 4 == 0) {
            const unsigned* words = reinterpret_cast<const unsigned*>(&raw);
#pragma unroll
            for (int k = 0; k < WIDTH; k += 4) E::widen(words[k / 4], v + k);
        } else {
            const E* elements = reinterpret_cast<const E*>(&raw);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) v[k] = widen(elements[k]);
        }
    }
};
