// launch: grid=ceil(T / 8), ceil(T / 8), B * NH block=8, 8
extern "C" __global__ void trimat_skip(const float* qkv, float* out, int T, int NH, int HS) {
    if (blockIdx.x >= blockIdx.y) return;  // the upper triangle is not needed
    const int i = blockIdx.y * 8 + threadIdx.y, j = blockIdx.x * 8 + threadIdx.x;
    if (i >= T || j >= T) return;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH, row = 3 * NH * HS;
    const float* q = qkv + ((long long)b * T + i) * row + h * HS;
    const float* k = qkv + ((long long)b * T + j) * row + NH * HS + h * HS;
    float s = 0.0f;
    for (int d = 0; d < HS; ++d) s += q[d] * k[d];
    out[((long long)blockIdx.z * T + i) * T + j] = s * rsqrtf((float)HS);
}
