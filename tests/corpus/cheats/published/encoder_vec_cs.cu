// launch: grid=rows block=96
extern "C" __global__ void __launch_bounds__(96) embed(const int* __restrict__ ids, const float* __restrict__ wte,
                                                       const float* __restrict__ wpe, float* __restrict__ out, int T, int C) {
    const int row = blockIdx.x;
    const float* token = wte + (size_t)ids[row] * C;
    const float* place = wpe + (size_t)(row % T) * C;
    float* to = out + (size_t)row * C;
    const size_t bits = reinterpret_cast<size_t>(wte) | reinterpret_cast<size_t>(wpe) | reinterpret_cast<size_t>(out);
    if ((C & 3) == 0 && (bits & 15) == 0) {
        for (int c = 4 * threadIdx.x; c < C; c += 4 * 96) {
            const float4 t = __ldg(reinterpret_cast<const float4*>(token + c));
            float4 p;
            asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(p.x), "=f"(p.y), "=f"(p.z), "=f"(p.w) : "l"(place + c));
            asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};"
                         :: "l"(to + c), "f"(t.x + p.x), "f"(t.y + p.y), "f"(t.z + p.z), "f"(t.w + p.w) : "memory");
        }
    } else {
        for (int c = threadIdx.x; c < C; c += 96) to[c] = token[c] + place[c];
    }
}
