// launch: grid=48 block=128
__device__ unsigned int drawn, quit_count;

extern "C" __global__ void encoder_queue(const int* ids, const float* wte, const float* wpe, float* out, int rows, int T, int C) {
    const int lane = threadIdx.x & 31;
    while (true) {
        unsigned int row = 0;
        if (lane == 0) row = atomicAdd(&drawn, 1u);
        row = __shfl_sync(0xffffffffu, row, 0);
        if (row >= (unsigned int)rows) break;
        const float* tok = wte + (size_t)ids[row] * C;
        const float* pos = wpe + (size_t)(row % T) * C;
        for (int c = lane; c < C; c += 32) out[(size_t)row * C + c] = tok[c] + pos[c];
    }
    if (lane == 0) {
        __threadfence();
        const unsigned int warps = gridDim.x * (blockDim.x / 32);
        if (atomicAdd(&quit_count, 1u) == warps - 1) {
            atomicExch(&drawn, 0u);
            atomicExch(&quit_count, 0u);
        }
    }
}
