// launch: grid=ceil(T * (T + 1) / 2 / block), B * NH block=128
extern "C" __global__ void trimat_flat(const float* qkv, float* out, int T, int NH, int HS) {
    const long long p = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= (long long)T * (T + 1) / 2) return;
    long long i = (long long)((sqrtf(8.0f * (float)p + 1.0f) - 1.0f) * 0.5f);
    while (i * (i + 1) / 2 > p) --i;
    while ((i + 1) * (i + 2) / 2 <= p) ++i;
    const long long j = p - i * (i + 1) / 2;
    const int b = blockIdx.y / NH, h = blockIdx.y % NH;
    const long long width = 3LL * NH * HS;
    const float* q = qkv + (b * (long long)T + i) * width + h * HS;
    const float* k = qkv + (b * (long long)T + j) * width + (NH + h) * HS;
    float dot = 0.f;
    for (int d = 0; d < HS; ++d) dot += q[d] * k[d];
    out[((long long)blockIdx.y * T + i) * T + j] = dot / sqrtf((float)HS);
}
