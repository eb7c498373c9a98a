// Kernels that write the order of threads, and their arguments: tests/emulator/test_emulator.py.
extern "C" __global__ void turns(int* out, int* counter) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = counter[0]++;
}
extern "C" __global__ void numbers(const float* none, long long* out, long long n, int i, float f) {
    out[0] = none ? 0 : n;
    out[1] = i;
    out[2] = (long long)(f * 4.0f);
}
