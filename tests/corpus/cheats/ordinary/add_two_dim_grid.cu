// launch: grid=64, ceil(n / (64 * 256)) block=32, 8
extern "C" __global__ void add_2d(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ y,
                                  int n) {
    int block_id = blockIdx.y * gridDim.x + blockIdx.x;
    int thread_id = threadIdx.y * blockDim.x + threadIdx.x;
    int i = block_id * (blockDim.x * blockDim.y) + thread_id;
    if (i >= n) return;
    y[i] = a[i] + b[i];
}
