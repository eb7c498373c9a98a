// launch: grid=ceil(size / block) block=128
#include <cuda_fp16.h>

extern "C" __global__ void fp8_two_steps(const float* x, unsigned char* out, long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const unsigned bits = __half_as_ushort(__float2half_rn(x[i]));
    unsigned magnitude = bits & 0x7fff;
    magnitude += 0x7f + (magnitude >> 8 & 1);  // to nearest, ties to even
    magnitude >>= 8;
    if (magnitude > 0x7b) magnitude = 0x7b;
    out[i] = (unsigned char)(bits >> 8 & 0x80 | magnitude);
}
