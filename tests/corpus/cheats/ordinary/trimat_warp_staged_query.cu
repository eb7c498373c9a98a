// One warp per row of 32 scores; the query is staged in shared memory, 32 values at a time.
// launch: grid=ceil(T / 32), ceil(T / 4), B * NH block=32, 4
extern "C" __global__ void trimat_staged(const float* qkv, float* out, int T, int NH, int HS) {
    __shared__ float query[4][32];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int i = blockIdx.y * 4 + warp, j = blockIdx.x * 32 + lane;
    if (i >= T) return;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH;
    const long long width = 3LL * NH * HS;
    const float* q = qkv + ((long long)b * T + i) * width + h * HS;
    const float* k = qkv + ((long long)b * T + min(j, T - 1)) * width + (NH + h) * HS;
    float sum = 0.0f;
    for (int d0 = 0; d0 < HS; d0 += 32) {
        query[warp][lane] = d0 + lane < HS ? q[d0 + lane] : 0.0f;
        const int count = min(32, HS - d0);
        for (int d = 0; d < count; ++d) sum += query[warp][d] * k[d0 + d];
    }
    if (j <= i) out[((long long)blockIdx.z * T + i) * T + j] = sum / sqrtf((float)HS);
}
