// The causal half of attention's scores: out[b, h, i, j] = Q_i . K_j / sqrt(HS) for j <= i
//
// One thread per score: correct but slow, because every thread reads a whole row of Q and of K.
//   gpt2block kernels trimat --mine my.cu
//
// Elements above the diagonal may hold anything. The launch line may use B, T, NH, HS, C and block.
// launch: grid=ceil(T / 16), ceil(T / 16), B * NH block=16, 16
extern "C" __global__ void my_trimat(
    const float* qkv,  // (B, T, 3, NH, HS): Q, K and V of every position
    float* out,        // (B, NH, T, T)
    int T, int NH, int HS) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const int i = blockIdx.y * blockDim.y + threadIdx.y;
    if (i >= T || j > i) return;
    const int b = blockIdx.z / NH, h = blockIdx.z % NH;
    const long long width = 3LL * NH * HS;  // floats per position
    const float* q = qkv + (b * (long long)T + i) * width + h * HS;
    const float* k = qkv + (b * (long long)T + j) * width + (NH + h) * HS;

    float sum = 0.0f;
    for (int d = 0; d < HS; ++d) sum += q[d] * k[d];
    out[((long long)blockIdx.z * T + i) * T + j] = sum / sqrtf((float)HS);
}
