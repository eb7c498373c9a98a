// launch: grid=min(ceil(n / block), 264) block=512
extern "C" __global__ void __launch_bounds__(512) gelu_loop(float* x, long long n) {
    for (long long i = blockIdx.x * 512LL + threadIdx.x; i < n; i += gridDim.x * 512LL) {
        const float v = x[i];
        const float u = 1.5957691216f * (v + 0.044715f * v * v * v);
        float e, r;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-u));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
        x[i] = v * r;
    }
}
