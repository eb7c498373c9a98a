#include "lib/storage.cuh"
// launch: grid=M block=128
extern "C" __global__ void __launch_bounds__(128) rms_mbarrier(const T* x, const T* weight, T* out, float eps, int C) {
    __shared__ __align__(8) unsigned long long arrivals;
    __shared__ float sums[4];
    const unsigned bar = (unsigned)__cvta_generic_to_shared(&arrivals);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 4;" :: "r"(bar) : "memory");
    __syncthreads();
    const size_t at = (size_t)blockIdx.x * C;
    float ss = 0.f;
    for (int c = threadIdx.x; c < C; c += 128) ss += widen(x[at + c]) * widen(x[at + c]);
    for (int d = 16; d; d /= 2) ss += __shfl_xor_sync(~0u, ss, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = ss;
    asm volatile(
        "{\n.reg .b64 state;\n.reg .pred ok;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "poll:\n"
        "mbarrier.test_wait.shared.b64 ok, [%0], state;\n"
        "@!ok bra poll;\n}" :: "r"(bar) : "memory");
    const float scale = rsqrtf((sums[0] + sums[1] + sums[2] + sums[3]) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) out[at + c] = narrow(widen(x[at + c]) * scale * widen(weight[c]));
}
