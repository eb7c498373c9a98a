// launch: grid=ceil(T / 32), ceil(T / 8), B * NH block=32, 8
#define RSQRT_HS 0.125f
extern "C" __global__ void trimat_direct(const float* qkv, float* out, int T, int NH, int HS) {
    const int j = blockIdx.x * 32 + threadIdx.x, i = blockIdx.y * 8 + threadIdx.y;
    if (i >= T || j > i) return;
    const int b = blockIdx.z / NH, h = blockIdx.z - b * NH;
    const size_t stride = (size_t)3 * NH * HS;
    const float* base = qkv + (size_t)b * T * stride + h * HS;
    const float* q = base + i * stride;
    const float* k = base + j * stride + NH * HS;
    float dot = 0.f;
    for (int d = 0; d < HS; ++d) dot = fmaf(q[d], k[d], dot);
    out[((size_t)blockIdx.z * T + i) * T + j] = dot * RSQRT_HS;
}
