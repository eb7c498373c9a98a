// Chapter 6, exercise 2: the causal half of attention's scores, each value as two in float16
//
// hi is x rounded to float16, and lo is the rest x - hi rounded to float16. Of the four products
// of two such values, lo * lo is negligible. A product of two float16 values has at most 22
// significant bits and is exact in float32, as on a tensor core.
//   gpt2block kernels trimat --mine my.cu
//
// launch: grid=ceil(T / 16), ceil(T / 16), B * NH block=16, 16
#include <cuda_fp16.h>

struct HiLo {
    float hi, lo;
};

__device__ HiLo hi_lo(float x) {
    const float hi = __half2float(__float2half_rn(x));
    return {hi, __half2float(__float2half_rn(x - hi))};
}

extern "C" __global__ void my_trimat(
    const float* qkv,  // (B, T, 3, NH, HS): Q, K and V of every position
    float* out,        // (B, NH, T, T)
    int T, int NH, int HS) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const int i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i >= T || j > i) return;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH;
    const long long width = 3LL * NH * HS;  // floats per position
    const float* q = qkv + (b * (long long)T + i) * width + h * HS;
    const float* k = qkv + (b * (long long)T + j) * width + (NH + h) * HS;

    float sum = 0.0f;
    for (int d = 0; d < HS; ++d) {
        const HiLo a = hi_lo(q[d]), c = hi_lo(k[d]);
        sum += a.lo * c.hi + a.hi * c.lo;  // the small products first
        sum += a.hi * c.hi;
    }
    out[((long long)blockIdx.z * T + i) * T + j] = sum / sqrtf((float)HS);
}
