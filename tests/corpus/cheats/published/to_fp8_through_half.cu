#include <cuda_fp16.h>
#include "lib/storage.cuh"
// launch: grid=ceil(size / block) block=256
extern "C" __global__ void half_then_e5m2(const T* __restrict__ x, unsigned char* __restrict__ out, long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const float v = fminf(fmaxf(widen(x[i]), -57344.0f), 57344.0f);
    const unsigned bits = __half_as_ushort(__float2half_rn(v)), mag = bits & 0x7fffu;
    const unsigned rounded = (mag + 0x7fu + (mag >> 8 & 1u)) >> 8;
    out[i] = (unsigned char)(rounded | (bits >> 8 & 0x80u));
}
