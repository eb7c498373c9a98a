// launch: grid=8, 8, ceil(n / (64 * block)) block=96
extern "C" __global__ void add_3d(const float* a, const float* b, float* y, long long n) {
    const long long block = blockIdx.x + 8LL * (blockIdx.y + 8LL * blockIdx.z);
    const long long i = n - 1 - (block * blockDim.x + threadIdx.x);
    if (i < 0) return;
    y[i] = a[i] + b[i];
}
