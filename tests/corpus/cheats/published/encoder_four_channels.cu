// launch: grid=rows block=128
extern "C" __global__ void __launch_bounds__(128) encode(const int* __restrict__ ids, const float* __restrict__ wte, const float* __restrict__ wpe,
                                                        float* __restrict__ out, int T, int C) {
    const size_t row = blockIdx.x;
    const float* token = wte + (size_t)ids[row] * C;
    const float* position = wpe + (row % T) * C;
    for (int c = 4 * threadIdx.x; c + 3 < C; c += 512) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            asm volatile("st.global.cs.f32 [%0], %1;" :: "l"(out + row * C + c + k), "f"(token[c + k] + position[c + k]) : "memory");
    }
}
