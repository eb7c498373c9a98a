// Chapter 11, exercise 1: E5M2 by arithmetic on the bits of a float; four numbers for each thread
//
// A float has 23 fraction bits, E5M2 two: 21 bits are rounded away, once.
//   gpt2block kernels to_fp8 --mine my.cu
//   gpt2block kernels to_fp8 --mine my.cu --dtype float16
//
// launch: grid=ceil(size / (4 * block)) block=256
#include "lib/storage.cuh"

__device__ unsigned code(float v) {
    const unsigned sign = (unsigned)__float_as_int(v) >> 24 & 0x80;
    if (v != v) return sign | 0x7e;  // NaN
    const float x = fminf(fabsf(v), 57344.0f);
    if (x < 0x1p-14f) return sign | (unsigned)rintf(x * 65536.0f);  // subnormal: a multiple of 2^-16
    unsigned bits = (unsigned)__float_as_int(x);
    bits += 0xfffff + (bits >> 21 & 1);             // round to nearest, ties to an even last bit
    return sign | ((bits >> 21) - (127 - 15) * 4);  // exponent bias: 15 in E5M2, 127 in float
}

extern "C" __global__ void my_to_fp8(
    const T* x,          // (size)
    unsigned char* out,  // (size)
    long long size) {
    const long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first + 4 <= size) {
        float v[4];
        Vec<T, 4>::load_once(x + first).unpack(v);  // 16 bytes of float32, or 8 bytes of 16-bit numbers
        *reinterpret_cast<unsigned*>(out + first) =
            code(v[0]) | code(v[1]) << 8 | code(v[2]) << 16 | code(v[3]) << 24;
    } else {
        for (long long i = first; i < size; ++i) out[i] = (unsigned char)code(widen(x[i]));
    }
}
