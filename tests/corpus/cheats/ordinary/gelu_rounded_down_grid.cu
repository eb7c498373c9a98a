// launch: grid=max(n // 256, 1) block=256
extern "C" __global__ void gelu_simple(float* x, int n) {
    int idx = threadIdx.x + blockIdx.x * blockDim.x;
    if (idx < n) {
        float val = x[idx];
        float cube = 0.044715f * val * val * val;
        x[idx] = 0.5f * val * (1.0f + tanhf(0.7978845608f * (val + cube)));
    }
}
