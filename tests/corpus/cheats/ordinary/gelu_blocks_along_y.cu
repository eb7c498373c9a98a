// launch: grid=1, ceil(n / block) block=256
extern "C" __global__ void gelu_y(float* x, long long n) {
    const long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x;
    if (i < n) {
        const float v = x[i];
        const float t = tanhf(0.7978845608f * v * (1.0f + 0.044715f * v * v));
        x[i] = v * 0.5f * (1.0f + t);
    }
}
