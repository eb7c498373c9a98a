// launch: grid=ceil(rows * C / block) block=320
extern "C" __global__ void encoder_guess(const int* ids, const float* wte, const float* wpe, float* out, int rows, int T, int C) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)rows * C) return;
    long long row = (long long)((float)i * (1.0f / C));
    long long c = i - row * C;
    while (c < 0) { c += C; --row; }
    while (c >= C) { c -= C; ++row; }
    out[i] = wte[(long long)ids[row] * C + c] + wpe[(row % T) * C + c];
}
