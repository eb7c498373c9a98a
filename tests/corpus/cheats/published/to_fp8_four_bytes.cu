#include "lib/storage.cuh"
__device__ __forceinline__ unsigned code_of(float v) {
    const unsigned u = __float_as_uint(v), a = u & 0x7fffffffu;
    unsigned c = a < 0x38800000u ? (unsigned)__float2int_rn(__uint_as_float(a) * 65536.f)
                                 : ((a + 0x000fffffu + ((a >> 21) & 1u)) >> 21) - 0x1c0u;
    c = a >= 0x47600000u ? 0x7bu : c;
    return c | (u >> 24 & 0x80u);
}

// launch: grid=ceil(size / 512) block=128
extern "C" __global__ void __launch_bounds__(128) convert4(const T* __restrict__ x, unsigned char* __restrict__ out, long long size) {
    const long long i = 4LL * (blockIdx.x * 128LL + threadIdx.x);
    if (i >= size) return;
    unsigned c[4] = {0, 0, 0, 0};
    for (int k = 0; k < 4; ++k) if (i + k < size) c[k] = code_of(widen(x[i + k]));
    if (i + 4 <= size) {
        unsigned lo, hi, all;
        asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(lo) : "r"(c[0]), "r"(c[1]));
        asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(hi) : "r"(c[2]), "r"(c[3]));
        asm("prmt.b32 %0, %1, %2, 0x1054;" : "=r"(all) : "r"(lo), "r"(hi));
        *reinterpret_cast<unsigned*>(out + i) = all;
    } else {
        for (int k = 0; i + k < size; ++k) out[i + k] = (unsigned char)c[k];
    }
}
