// launch: grid=rows block=128
#include <cub/block/block_reduce.cuh>

struct Larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};

extern "C" __global__ void __launch_bounds__(128) softmax_cub(const float* x, float* y, int n) {
    typedef cub::BlockReduce<float, 128> Reduce;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ float shared_max, shared_sum;
    const float* in = x + (long long)blockIdx.x * n;
    float* out = y + (long long)blockIdx.x * n;

    float m = -INFINITY;
    for (int i = threadIdx.x; i < n; i += 128) m = fmaxf(m, in[i]);
    m = Reduce(storage).Reduce(m, Larger());
    if (threadIdx.x == 0) shared_max = m;
    __syncthreads();
    m = shared_max;

    float s = 0.0f;
    for (int i = threadIdx.x; i < n; i += 128) s += __expf(in[i] - m);
    s = Reduce(storage).Sum(s);
    if (threadIdx.x == 0) shared_sum = s;
    __syncthreads();
    const float scale = 1.0f / shared_sum;
    for (int i = threadIdx.x; i < n; i += 128) out[i] = __expf(in[i] - m) * scale;
}
