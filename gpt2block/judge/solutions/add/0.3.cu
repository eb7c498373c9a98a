// Chapter 0, exercise 3: y = a + b with 4 blocks of 64 threads, whatever n is
//
// The 256 threads compute elements 0 to 255 first, then 256 to 511, and so on. The condition
// of the loop is the bounds check. Such a loop is called a grid-stride loop.
//   gpt2block kernels add --mine my.cu
//
// launch: grid=4 block=64
extern "C" __global__ void my_add(
    const float* a,  // (n)
    const float* b,  // (n)
    float* y,        // (n)
    long long n) {
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;  // threads of the whole grid
    for (long long i = first; i < n; i += threads) y[i] = a[i] + b[i];
}
