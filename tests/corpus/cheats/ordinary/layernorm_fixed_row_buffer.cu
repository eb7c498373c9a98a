// launch: grid=N block=128
#define MAX_C 512

extern "C" __global__ void layernorm_buffered(const float* x, const float* gamma, const float* beta, float* out,
                                              float eps, int C) {
    __shared__ float row[MAX_C];
    __shared__ float totals[2];
    if (threadIdx.x < 2) totals[threadIdx.x] = 0.0f;
    __syncthreads();
    float part = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        row[c] = x[(long long)blockIdx.x * C + c];
        part += row[c];
    }
    atomicAdd(&totals[0], part);
    __syncthreads();
    const float mean = totals[0] / C;
    part = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) part += (row[c] - mean) * (row[c] - mean);
    atomicAdd(&totals[1], part);
    __syncthreads();
    const float scale = rsqrtf(totals[1] / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        out[(long long)blockIdx.x * C + c] = (row[c] - mean) * scale * gamma[c] + beta[c];
}
