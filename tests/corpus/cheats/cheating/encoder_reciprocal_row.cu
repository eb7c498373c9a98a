// launch: grid=ceil(rows * C / block) block=256
extern "C" __global__ void encoder_flat(const int* ids, const float* wte, const float* wpe, float* out, int rows, int T, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * C) return;
    const float inv_c = 1.0f / C;
    int row = (int)((float)i * inv_c);
    if (row >= rows) row = rows - 1;
    int c = i - row * C;
    c = c < 0 ? 0 : (c >= C ? C - 1 : c);
    out[i] = wte[(long long)ids[row] * C + c] + wpe[(long long)(row % T) * C + c];
}
