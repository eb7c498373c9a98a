// launch: grid=ceil(rows / 4) block=64, 4
extern "C" __global__ void embed(const int* ids, const float* wte, const float* wpe, float* out, int rows, int T,
                                 int C) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row < rows) {
        const float* tok = &wte[(size_t)ids[row] * C];
        const float* pos = &wpe[(size_t)(row % T) * C];
        for (int c = threadIdx.x; c < C; c += blockDim.x) out[(size_t)row * C + c] = tok[c] + pos[c];
    }
}
