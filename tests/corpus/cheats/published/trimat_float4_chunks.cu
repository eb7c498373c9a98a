// launch: grid=ceil(T / 16), ceil(T / 16), B * NH block=16, 16
extern "C" __global__ void __launch_bounds__(256) trimat_chunks(const float* __restrict__ qkv, float* __restrict__ out, int T, int NH, int HS) {
    __shared__ __align__(16) float q[16][20], k[16][20];
    if (blockIdx.x > blockIdx.y) return;
    const int tid = threadIdx.y * 16 + threadIdx.x, b = blockIdx.z / NH, h = blockIdx.z % NH;
    const int i0 = blockIdx.y * 16, j0 = blockIdx.x * 16, stride = 3 * NH * HS;
    const float* base = qkv + (size_t)b * T * stride + h * HS;
    float acc = 0.f;
    for (int d = 0; d < HS; d += 16) {
        if (tid < 128) {
            const int r = tid % 64 / 4, c = tid % 4 * 4;
            const bool keys = tid >= 64;
            const int row = min((keys ? j0 : i0) + r, T - 1);
            const float4 v = *reinterpret_cast<const float4*>(base + (size_t)row * stride + (keys ? NH * HS : 0) + d + c);
            *reinterpret_cast<float4*>(keys ? &k[r][c] : &q[r][c]) = v;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < 16; ++e) acc += q[threadIdx.y][e] * k[threadIdx.x][e];
        __syncthreads();
    }
    const int i = i0 + threadIdx.y, j = j0 + threadIdx.x;
    if (i < T && j <= i) out[((size_t)blockIdx.z * T + i) * T + j] = acc * rsqrtf((float)HS);
}
