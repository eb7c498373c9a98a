// launch: grid=ceil(T / 16), ceil(T / 16), B * NH block=16, 16
extern "C" __global__ void trimat_tiles(const float* qkv, float* out, int T, int NH, int HS) {
    if (blockIdx.x > blockIdx.y) return;
    __shared__ float qs[16][17], ks[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int i = blockIdx.y * 16 + ty, j = blockIdx.x * 16 + tx, jl = blockIdx.x * 16 + ty;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH;
    const size_t width = 3 * (size_t)NH * HS;
    const float* q = qkv + b * (size_t)T * width + h * HS;
    const float* k = q + NH * HS;
    float acc = 0.0f;
    for (int d0 = 0; d0 < HS; d0 += 16) {
        qs[ty][tx] = i < T && d0 + tx < HS ? q[i * width + d0 + tx] : 0.0f;
        ks[ty][tx] = jl < T && d0 + tx < HS ? k[jl * width + d0 + tx] : 0.0f;
        __syncthreads();
        for (int d = 0; d < 16; ++d) acc += qs[ty][d] * ks[tx][d];
        __syncthreads();
    }
    if (i < T && j <= i) out[((size_t)blockIdx.z * T + i) * T + j] = acc / sqrtf((float)HS);
}
