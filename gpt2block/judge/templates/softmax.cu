// Softmax: y = exp(x - max) / sum of exp(x - max) over each row
//
// One thread per row, three passes: correct but slow, because neighbouring threads read addresses a
// row apart.
//   gpt2block kernels softmax --mine my.cu
//
// The launch line may use rows, n, B, NH, T and block.
// launch: grid=ceil(rows / block) block=64
extern "C" __global__ void my_softmax(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* x_row = x + (long long)row * n;
    float* y_row = y + (long long)row * n;

    float largest = x_row[0];
    for (int i = 1; i < n; ++i) largest = fmaxf(largest, x_row[i]);

    float sum = 0.0f;
    for (int i = 0; i < n; ++i) sum += expf(x_row[i] - largest);

    for (int i = 0; i < n; ++i) y_row[i] = expf(x_row[i] - largest) / sum;
}
