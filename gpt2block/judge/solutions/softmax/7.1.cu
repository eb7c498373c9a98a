// Chapter 7, exercise 1: softmax, one thread per row, maximum and sum in one pass
//
// m is the largest value so far, s the sum of exp(x - m) so far. If a value exceeds m, all
// terms of s were relative to a maximum that is too small, and exp(old m - new m) corrects
// them at once. x is read twice instead of three times.
//   gpt2block kernels softmax --mine my.cu
//
// launch: grid=ceil(rows / block) block=64

extern "C" __global__ void my_softmax(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* x_row = x + (long long)row * n;
    float* y_row = y + (long long)row * n;

    float m = x_row[0], s = 0.0f;
    for (int i = 0; i < n; ++i) {
        const float v = x_row[i];
        if (v > m) {
            s *= expf(m - v);  // expf is 0 if m is -inf: earlier values have weight 0
            m = v;
        }
        if (v > -INFINITY) s += expf(v - m);  // -inf - (-inf) would be NaN
    }
    for (int i = 0; i < n; ++i) y_row[i] = expf(x_row[i] - m) / s;
}
