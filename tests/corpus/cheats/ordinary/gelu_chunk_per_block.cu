// Every block handles one contiguous chunk of the array.
// launch: grid=256 block=256
extern "C" __global__ void gelu_chunks(float* x, int n) {
    int begin = blockIdx.x * n / (int)gridDim.x;
    int end = (blockIdx.x + 1) * n / (int)gridDim.x;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        float v = x[i];
        x[i] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    }
}
