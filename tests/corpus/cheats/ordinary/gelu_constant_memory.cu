// launch: grid=min(ceil(n / block), 2048) block=256
struct Coefficients {
    float half, root, cubic;
};
__constant__ Coefficients coef = {0.5f, 0.79788456f, 0.044715f};

extern "C" __global__ void gelu_with_constants(float* x, unsigned int n) {
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float v = x[i];
        float t = tanhf(coef.root * (v + coef.cubic * v * v * v));
        x[i] = coef.half * v * (1.0f + t);
    }
}
