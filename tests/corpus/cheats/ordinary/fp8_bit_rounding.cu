// launch: grid=ceil(size / 512) block=512
#include "lib/storage.cuh"

__device__ unsigned char to_e5m2(float v) {
    const unsigned bits = __float_as_uint(v), sign = bits >> 24 & 0x80u;
    const float a = fabsf(v);
    if (a >= 57344.0f) return (unsigned char)(sign | 0x7bu);
    if (a < 6.103515625e-05f) {  // below 2^-14: multiples of 2^-16
        return (unsigned char)(sign | (unsigned)rintf(a * 65536.0f));
    }
    unsigned m = bits & 0x7fffffffu;
    m += 0x000fffffu + (m >> 21 & 1u);  // 21 bits are dropped
    const unsigned code = (m >> 21) - ((127u - 15u) << 2);
    return (unsigned char)(sign | (code > 0x7bu ? 0x7bu : code));
}

extern "C" __global__ void fp8_bits(const T* x, unsigned char* out, long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = to_e5m2(widen(x[i]));
}
