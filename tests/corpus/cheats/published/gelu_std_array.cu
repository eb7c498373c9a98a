#include <cuda/std/array>
// launch: grid=ceil(n / 1024) block=256
constexpr int ITEMS = 4;
extern "C" __global__ void gelu_items(float* x, long long n) {
    cuda::std::array<float, ITEMS> v;
    const long long first = (long long)blockIdx.x * (256 * ITEMS) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) v[k] = first + 256 * k < n ? __ldcs(x + first + 256 * k) : 0.0f;
    for (auto& e : v) {
        float cubic, inner;
        asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(cubic) : "f"(0.044715f * e * e), "f"(e), "f"(e));
        inner = 0.7978845608028654f * cubic;
        e = 0.5f * e * (1.0f + tanhf(inner));
    }
#pragma unroll
    for (int k = 0; k < ITEMS; ++k)
        if (first + 256 * k < n) __stcs(x + first + 256 * k, v[k]);
}
