// launch: grid=rows block=128
#define MAX_TOKENS 4096
extern "C" __global__ void encoder_block_per_token(const int* ids, const float* wte, const float* wpe, float* out,
                                                   int rows, int T, int C) {
    const int row = blockIdx.x;
    if (row >= MAX_TOKENS || row >= rows) return;
    const float* tok = wte + (size_t)ids[row] * C;
    const float* pos = wpe + (size_t)(row % T) * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) out[(size_t)row * C + c] = tok[c] + pos[c];
}
