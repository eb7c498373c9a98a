// GELU(v) = v * sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3); float4 per thread, streaming stores.
// launch: grid=ceil(n / (4 * block)) block=256
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float gelu1(float v) {
    const float u = v * fmaf(0.03567740814f * v, v, 0.7978845608f);
    return v * rcp(1.0f + ex2(-2.885390082f * u));
}

extern "C" __global__ void gelu_vec4(float* __restrict__ x, long long n) {
    const long long base = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    const bool aligned = (reinterpret_cast<unsigned long long>(x) & 15) == 0;
    if (aligned && base + 4 <= n) {
        float4 v = *reinterpret_cast<const float4*>(x + base);
        v.x = gelu1(v.x); v.y = gelu1(v.y); v.z = gelu1(v.z); v.w = gelu1(v.w);
        asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(x + base), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    } else {
        for (long long i = base; i < base + 4 && i < n; ++i) x[i] = gelu1(x[i]);
    }
}
