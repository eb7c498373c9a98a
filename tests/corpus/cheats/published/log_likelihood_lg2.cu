// launch: grid=N block=256
__device__ __forceinline__ float2 join(float2 a, float2 b) {
    const float m = fmaxf(a.x, b.x);
    if (m == -INFINITY) return make_float2(m, 0.0f);
    return make_float2(m, a.y * __expf(a.x - m) + b.y * __expf(b.x - m));
}
__device__ __forceinline__ float2 warp_join(float2 v) {
    for (int d = 16; d; d >>= 1)
        v = join(v, make_float2(__shfl_xor_sync(~0u, v.x, d), __shfl_xor_sync(~0u, v.y, d)));
    return v;
}

extern "C" __global__ void __launch_bounds__(256) token_log_prob(const float* __restrict__ logits,
                                                                 const int* __restrict__ targets,
                                                                 float* __restrict__ out, int V) {
    __shared__ float2 parts[8];
    const float* row = logits + (size_t)blockIdx.x * V;
    float2 v = make_float2(-INFINITY, 0.0f);
    for (int i = threadIdx.x; i < V; i += 256) v = join(v, make_float2(row[i], 1.0f));
    v = warp_join(v);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = warp_join(threadIdx.x < 8 ? parts[threadIdx.x] : make_float2(-INFINITY, 0.0f));
        if (threadIdx.x == 0) {
            float l;
            asm("lg2.approx.f32 %0, %1;" : "=f"(l) : "f"(v.y));
            out[blockIdx.x] = (row[targets[blockIdx.x]] - v.x) - 0.6931471806f * l;
        }
    }
}
