// 0.5 * (1 + tanh(u)) is the logistic function of 2u.
// launch: grid=ceil(n / (2 * block)) block=256
extern "C" __global__ void gelu_logistic(float* x, long long n) {
    const long long base = 2LL * blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const long long i = base + j * blockDim.x;
        if (i < n) {
            const float v = x[i];
            const float two_u = 1.5957691216f * v * fmaf(0.044715f * v, v, 1.0f);
            x[i] = v / (1.0f + expf(-two_u));
        }
    }
}
