// Conversion to FP8, E5M2: the byte whose number is nearest, ties to the even byte; magnitudes above
// the largest number, 57344, become 57344
//
// One thread per element: correct but slow, because each thread tries all bytes.
//   gpt2block kernels to_fp8 --mine my.cu
//
// The launch line may use size, K, N (size = K * N) and block. T is the type of --dtype; see
// kernels_cu/lib/storage.cuh for widen (to float).
// launch: grid=ceil(size / block) block=256
#include "lib/storage.cuh"

__device__ float magnitude(int byte) {  // sign (1 bit), exponent (5), fraction (2)
    const int exponent = byte >> 2, fraction = byte & 3;
    return exponent ? ldexpf(4.0f + fraction, exponent - 17) : ldexpf((float)fraction, -16);
}

extern "C" __global__ void my_to_fp8(
    const T* x,          // (size)
    unsigned char* out,  // (size)
    long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const float v = widen(x[i]);
    int best = 0;
    for (int byte = 1; byte <= 0x7b; ++byte) {
        const float now = fabsf(fabsf(v) - magnitude(byte)), before = fabsf(fabsf(v) - magnitude(best));
        if (now < before || (now == before && byte % 2 == 0)) best = byte;
    }
    out[i] = (unsigned char)(v < 0.0f ? best | 0x80 : best);
}
