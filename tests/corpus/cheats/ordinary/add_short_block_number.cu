// launch: grid=ceil(n / block) block=64
extern "C" __global__ void add_small(const float* a, const float* b, float* y, int n) {
    const unsigned short block = blockIdx.x;
    const int i = block * 64 + threadIdx.x;
    if (i < n) y[i] = a[i] + b[i];
}
