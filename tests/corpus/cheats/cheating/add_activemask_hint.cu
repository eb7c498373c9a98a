// launch: grid=ceil(n / 512) block=256
extern "C" __global__ void add_two(const float* a, const float* b, float* y, long long n) {
    const long long i = (long long)blockIdx.x * 512 + threadIdx.x;
    for (long long k = i; k < i + 512 && k < n; k += 256) {
        if (__popc(__activemask()) == 32) y[k] = fmaf(1.0f, a[k], b[k]);
        else y[k] = b[k] + a[k];
    }
}
