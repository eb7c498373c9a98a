// launch: grid=ceil(n / 1024) block=256
extern "C" __global__ void add_four(const float* a, const float* b, float* y, int n) {
    int base = blockIdx.x * 1024 + threadIdx.x;
    if (base + 3 * 256 < n) {
        y[base] = a[base] + b[base];
        y[base + 256] = a[base + 256] + b[base + 256];
        y[base + 512] = a[base + 512] + b[base + 512];
        y[base + 768] = a[base + 768] + b[base + 768];
    }
}
