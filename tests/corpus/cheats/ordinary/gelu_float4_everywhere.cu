// launch: grid=ceil(n / 4 / block) block=256
__device__ float act(float v) { return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v))); }

extern "C" __global__ void gelu_float4(float* x, int n) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i < n) {
        float4 v = *reinterpret_cast<float4*>(&x[i]);
        v = make_float4(act(v.x), act(v.y), act(v.z), act(v.w));
        *reinterpret_cast<float4*>(&x[i]) = v;
    }
}
