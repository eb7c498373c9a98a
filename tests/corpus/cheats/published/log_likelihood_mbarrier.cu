// launch: grid=N block=128
__device__ __forceinline__ void arrive_and_wait(unsigned bar, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
        "@p bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" :: "r"(bar), "r"(parity) : "memory");
}

extern "C" __global__ void __launch_bounds__(128) target_log_prob(const float* logits, const int* targets, float* out, int V) {
    __shared__ unsigned long long barrier;
    __shared__ float tops[128], sums[128];
    const unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 128;" :: "r"(bar) : "memory");
    __syncthreads();
    const float* row = logits + (size_t)blockIdx.x * V;
    float m = -INFINITY;
    for (int v = threadIdx.x; v < V; v += 128) m = fmaxf(m, row[v]);
    tops[threadIdx.x] = m;
    arrive_and_wait(bar, 0);
    for (int t = 0; t < 128; ++t) m = fmaxf(m, tops[t]);
    float s = 0.0f;
    for (int v = threadIdx.x; v < V; v += 128) s += expf(row[v] - m);
    sums[threadIdx.x] = s;
    arrive_and_wait(bar, 1);
    if (threadIdx.x == 0) {
        s = 0.0f;
        for (int t = 0; t < 128; ++t) s += sums[t];
        out[blockIdx.x] = row[targets[blockIdx.x]] - m - logf(s);
    }
}
