#include "lib/storage.cuh"
// launch: grid=ceil(M / 4) block=128
extern "C" __global__ void __launch_bounds__(128) rms_pack(const T* x, const T* weight, T* out, float eps, int M, int C) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;
    const T* in = x + (size_t)row * C;
    T* to = out + (size_t)row * C;
    float ss = 0.f;
    for (int c = lane; c < C; c += 32) ss = fmaf(widen(in[c]), widen(in[c]), ss);
    for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(~0u, ss, d);
    const float scale = rsqrtf(ss / C + eps);
    if (C % 2 == 0 && sizeof(T) == 2) {
        for (int c = 2 * lane; c < C; c += 64) {
            const float first = widen(in[c]) * scale * widen(weight[c]);
            const float second = widen(in[c + 1]) * scale * widen(weight[c + 1]);
            unsigned pair;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(first), "f"(second));
            *reinterpret_cast<unsigned*>(to + c) = pair;
        }
    } else {
        for (int c = lane; c < C; c += 32) to[c] = narrow(widen(in[c]) * scale * widen(weight[c]));
    }
}
