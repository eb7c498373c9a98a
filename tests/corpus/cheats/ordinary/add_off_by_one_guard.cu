// launch: grid=ceil((n + 1) / block) block=256
extern "C" __global__ void vector_add(const float* a, const float* b, float* y, int n) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i <= n) {
        y[i] = a[i] + b[i];
    }
}
