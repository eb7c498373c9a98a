// launch: grid=rows block=128
extern "C" __global__ void embed_tokens(const int* ids, const float* wte, const float* wpe, float* out, int T, int C) {
    const short token = (short)ids[blockIdx.x];
    const short position = (short)(blockIdx.x % T);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        out[(long long)blockIdx.x * C + c] = wte[(long long)token * C + c] + wpe[(long long)position * C + c];
    }
}
