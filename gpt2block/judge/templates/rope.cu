// RoPE, rotary position embedding: rotates the pairs of channels (2k, 2k + 1) of each head
//
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a),   a = (start + t) / theta^(2k / D)
//
// One thread per pair: correct but slow, because every head computes the same sines and cosines
// again, in double: a float angle of 100,000 radians is off by up to 0.004.
//   gpt2block kernels rope --mine my.cu
//
// The launch line may use T, H, D, start and block. T of `const T*` is the type of --dtype, float16
// by default; see kernels_cu/lib/storage.cuh for widen (to float) and narrow (from float).
// launch: grid=ceil(D / 2 / block), H, T block=64
#include "lib/storage.cuh"

extern "C" __global__ void my_rope(
    const T* x,  // (T, H, D)
    T* out,      // (T, H, D)
    int start, float theta, int H, int D) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, t = blockIdx.z;
    if (k >= D / 2) return;
    const long long first = ((long long)t * H + head) * D + 2 * k;

    const double angle = (start + t) / pow((double)theta, 2.0 * k / D);
    const float c = (float)cos(angle), s = (float)sin(angle);
    const float r = widen(x[first]), i = widen(x[first + 1]);
    out[first] = narrow(r * c - i * s);
    out[first + 1] = narrow(r * s + i * c);
}
