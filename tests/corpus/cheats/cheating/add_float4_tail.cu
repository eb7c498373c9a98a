// launch: grid=max(ceil(n / 4 / block), 1) block=256
extern "C" __global__ void add_quads(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y, long long n) {
    const long long q = (long long)blockIdx.x * blockDim.x + threadIdx.x, quads = n >> 2;
    if (q < quads) {
        float4 u = reinterpret_cast<const float4*>(a)[q];
        const float4 v = reinterpret_cast<const float4*>(b)[q];
        u.x += v.x; u.y += v.y; u.z += v.z; u.w += v.w;
        reinterpret_cast<float4*>(y)[q] = u;
    }
    const int rest = (int)(n & 3);
    if (q < rest) {
        a += quads * 4;
        y += quads * 4;
        y[q] = a[q] + b[q];
    }
}
