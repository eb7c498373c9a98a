// launch: grid=ceil(size / 128) block=128
#include "lib/storage.cuh"
extern "C" __global__ void fp8_rint(const T* x, unsigned char* out, long long size) {
    const long long i = (long long)blockIdx.x * 128 + threadIdx.x;
    if (i >= size) return;
    const float v = widen(x[i]), a = fminf(fabsf(v), 57344.0f);
    const int field = (int)(__float_as_uint(a) >> 23) - 127;
    const int e = max(field, -14);
    const float power = __int_as_float((2 - e + 127) << 23);
    const int byte = (e + 14) * 4 + (int)rintf(a * power);
    out[i] = (unsigned char)(v < 0.0f ? byte | 128 : byte);
}
