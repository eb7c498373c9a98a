// Token plus position embedding: out[b, t] = wte[ids[b, t]] + wpe[t]
//
// One thread per token: correct but slow, because neighbouring threads read addresses a row apart.
//   gpt2block kernels encoder --mine my.cu
//
// The launch line may use rows (B * T), B, T, C, V and block.
// launch: grid=ceil(rows / block) block=64
extern "C" __global__ void my_encoder(
    const int* ids,    // (B, T), 0 to V - 1
    const float* wte,  // (V, C)
    const float* wpe,  // (T, C)
    float* out,        // (B, T, C)
    int rows, int T, int C) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* token = wte + (long long)ids[row] * C;
    const float* position = wpe + (long long)(row % T) * C;
    for (int c = 0; c < C; ++c) out[(long long)row * C + c] = token[c] + position[c];
}
