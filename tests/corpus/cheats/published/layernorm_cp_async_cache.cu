// launch: grid=N block=128 shared=4 * min(C, 8192)
#define KEEP 8192
__device__ __forceinline__ float block_sum(float v, float* part) {
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
    __syncthreads();  // part may still be read from the call before
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
}

extern "C" __global__ void __launch_bounds__(128) layernorm_async(
    const float* __restrict__ x, const float* __restrict__ gamma, const float* __restrict__ beta,
    float* __restrict__ out, float eps, int C) {
    extern __shared__ float kept[];
    __shared__ float part[4];
    const float* row = x + (long long)blockIdx.x * C;
    const int held = C < KEEP ? C : KEEP;
    for (int c = threadIdx.x; c < held; c += 128) {
        const unsigned dst = (unsigned)__cvta_generic_to_shared(kept + c);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(dst), "l"(row + c) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    float s = 0.0f;
    for (int c = threadIdx.x; c < C; c += 128) s += c < held ? kept[c] : row[c];
    const float mean = block_sum(s, part) / C;
    float q = 0.0f;
    for (int c = threadIdx.x; c < C; c += 128) {
        const float d = (c < held ? kept[c] : row[c]) - mean;
        q += d * d;
    }
    const float rstd = rsqrtf(block_sum(q, part) / C + eps);
    for (int c = threadIdx.x; c < C; c += 128) {
        const float v = c < held ? kept[c] : row[c];
        out[(long long)blockIdx.x * C + c] = (v - mean) * rstd * gamma[c] + beta[c];
    }
}
