// launch: grid=ceil(n / (2 * block)) block=256
__device__ __forceinline__ float2 tanh_pair(float a, float b) {
    unsigned h;
    float2 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(b), "f"(a));
    asm("tanh.approx.f16x2 %0, %0;" : "+r"(h));
    asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}" : "=f"(r.x), "=f"(r.y) : "r"(h));
    return r;
}
__device__ __forceinline__ float inner(float v) { return 0.7978845608f * fmaf(0.044715f * v * v, v, v); }

extern "C" __global__ void gelu_inplace(float* __restrict__ x, long long n) {
    const long long i = (long long)blockIdx.x * 2 * blockDim.x + threadIdx.x, j = i + blockDim.x;
    const float u = i < n ? x[i] : 0.0f, v = j < n ? x[j] : 0.0f;
    const float2 t = tanh_pair(inner(u), inner(v));
    if (i < n) x[i] = 0.5f * u * (1.0f + t.x);
    if (j < n) x[j] = 0.5f * v * (1.0f + t.y);
}
