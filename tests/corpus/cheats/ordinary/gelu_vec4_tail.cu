// GELU on four values per thread; leftovers are handled by the first threads of the tail.
// launch: grid=ceil(ceil(n / 4) / block) block=128
__device__ __forceinline__ float gelu_scalar(float v) {
    const float kAlpha = 0.7978845608028654f;
    float inner = kAlpha * (v + 0.044715f * v * v * v);
    return 0.5f * v * (1.0f + tanhf(inner));
}

extern "C" __global__ void gelu_vec4(float* x, int n) {
    int quad = blockIdx.x * blockDim.x + threadIdx.x;
    int quads = n / 4;
    if (quad < quads) {
        float4* p = reinterpret_cast<float4*>(x) + quad;
        float4 v = *p;
        v.x = gelu_scalar(v.x);
        v.y = gelu_scalar(v.y);
        v.z = gelu_scalar(v.z);
        v.w = gelu_scalar(v.w);
        *p = v;
    } else if (quad == quads) {
        for (int i = quads * 4; i < n; ++i) x[i] = gelu_scalar(x[i]);
    }
}
