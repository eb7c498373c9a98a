// launch: grid=ceil(n / block) block=128
#define GELU_SCALE 0.7978845608028654f
#define GELU_CUBIC 0.0044715f

extern "C" __global__ void gelu_fwd(float* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        float xi = x[i];
        float u = GELU_SCALE * (xi + GELU_CUBIC * xi * xi * xi);
        x[i] = 0.5f * xi * (1.0f + tanhf(u));
    }
}
