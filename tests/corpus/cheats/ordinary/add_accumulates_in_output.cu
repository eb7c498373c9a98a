// launch: grid=ceil(n / block) block=512
extern "C" __global__ void accumulate(const float* a, const float* b, float* y, long long n) {
    const long long i = (long long)blockIdx.x * 512 + threadIdx.x;
    const float* operands[2] = {a, b};
    if (i < n) {
        for (int k = 0; k < 2; ++k) y[i] += operands[k][i];
    }
}
