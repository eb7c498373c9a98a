// launch: grid=96 block=256
extern "C" __global__ void __launch_bounds__(256) add_grid_stride(const float* a, const float* b, float* y, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        float u, v;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(u) : "l"(a + i));
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(b + i));
        asm volatile("st.global.wt.f32 [%0], %1;" :: "l"(y + i), "f"(u + v) : "memory");
    }
}
