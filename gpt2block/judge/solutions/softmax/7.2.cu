// Chapter 7, exercise 2: softmax, one warp per row, whose lanes merge their maxima and sums by shuffles
//
// Each lane computes (m, s) of every 32nd value. After five merges all lanes have (m, s) of the
// row. A lane without a value has m = -inf and s = 0, and must not compute exp(-inf - (-inf)),
// which is NaN.
//   gpt2block kernels softmax --mine my.cu
//
// launch: grid=ceil(rows / 8) block=256

struct Online {
    float m, s;  // the largest value, the sum of exp(value - m)
};

// Return the number to subtract before exp: m, or 0 if m is -inf, since exp(-inf - 0) is 0.
__device__ float reference(float m) { return m == -INFINITY ? 0.0f : m; }

// Return (m, s) of the values of a and b together; the result is the same for (b, a).
__device__ Online merged(Online a, Online b) {
    const float m = fmaxf(a.m, b.m), point = reference(m);
    return {m, a.s * expf(a.m - point) + b.s * expf(b.m - point)};
}

__device__ Online merged_over_lanes(Online own) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const Online other = {
            __shfl_xor_sync(0xffffffffu, own.m, distance), __shfl_xor_sync(0xffffffffu, own.s, distance)};
        own = merged(own, other);
    }
    return own;
}

extern "C" __global__ void my_softmax(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * 8 + warp;
    if (row >= rows) return;  // the same for the whole warp
    const float* x_row = x + (long long)row * n;
    float* y_row = y + (long long)row * n;

    Online own = {-INFINITY, 0.0f};
    for (int i = lane; i < n; i += 32) own = merged(own, {x_row[i], 1.0f});  // (m, s) of one value x: s = exp(x - x) = 1
    const Online all = merged_over_lanes(own);

    for (int i = lane; i < n; i += 32) y_row[i] = expf(x_row[i] - reference(all.m)) / all.s;
}
