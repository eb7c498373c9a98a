// launch: grid=ceil(n / 1024) block=256
constexpr int PER_THREAD = 4;

extern "C" __global__ void add_unrolled(const float* a, const float* b, float* y, long long n) {
    const long long first = (long long)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    float left[PER_THREAD], right[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        const long long i = first + (long long)k * blockDim.x;
        left[k] = i < n ? a[i] : 0.0f;
        right[k] = i < n ? b[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        const long long i = first + (long long)k * blockDim.x;
        if (i < n) y[i] = left[k] + right[k];
    }
}
