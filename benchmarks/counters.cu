// Kernels that benchmarks/counters.py launches on a GPU and on the engine: a transposed read, and one access of each kind
// whose cost depends on how the hardware divides a warp. Blocks of 128 threads; x and out have 1,048,576 elements.
#define TILE 8192  // floats of shared memory

// (SIDE, SIDE) -> its transpose: neighbouring threads read a column of x
extern "C" __global__ void transposed_read(const float* x, float* out) {
    constexpr int SIDE = 512;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < SIDE * SIDE; i += gridDim.x * blockDim.x) {
        out[i] = x[i % SIDE * SIDE + i / SIDE];
    }
}

#define ELEMENT const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;

extern "C" __global__ void global_16_one_address(const float* x, float* out) {
    ELEMENT
    const float4 v = reinterpret_cast<const float4*>(x)[blockIdx.x];
    out[i] = v.x + v.y + v.z + v.w * t;
}

extern "C" __global__ void global_16_two_addresses(const float* x, float* out) {
    ELEMENT
    const float4 v = reinterpret_cast<const float4*>(x)[4 * blockIdx.x + t % 2];
    out[i] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void global_8_shared_by_halves(const float* x, float* out) {
    ELEMENT
    const float2 v = reinterpret_cast<const float2*>(x)[64 * blockIdx.x + t % 16];
    out[i] = v.x + v.y;
}

extern "C" __global__ void global_store_8_apart(const float* x, float* out) {
    ELEMENT
    reinterpret_cast<float2*>(out)[2 * i] = make_float2(x[i], 1.0f);
}

// One statement on a tile in shared memory, whose values do not matter. l: the lane; v: the result.
#define ON_TILE(NAME, STATEMENT)                                      \
    extern "C" __global__ void NAME(const float* x, float* out) {     \
        __shared__ __align__(16) float tile[TILE];                    \
        ELEMENT                                                       \
        const int l = t % 32;                                         \
        float v = i;                                                  \
        tile[t] = x[i];                                               \
        __syncthreads();                                              \
        STATEMENT                                                     \
        __syncthreads();                                              \
        out[i] = v + tile[t];                                         \
    }
#define PAIR(at) reinterpret_cast<float2*>(tile + (at))
#define FOUR(at) reinterpret_cast<float4*>(tile + (at))
#define PLACE(at) "r"((unsigned)__cvta_generic_to_shared(tile + (at)))
#define COPY(at, bytes) \
    asm volatile("cp.async.ca.shared.global [%0], [%1], " #bytes ";" :: PLACE(at), "l"(x + 4 * i) : "memory"); \
    asm volatile("cp.async.wait_all;" ::: "memory");

ON_TILE(shared_4_column, v = tile[32 * l];)
ON_TILE(shared_8_one_half, const float2 a = *PAIR(2 * (l % 16)); v = a.x + a.y;)
ON_TILE(shared_8_stride_4, const float2 a = *PAIR(4 * l); v = a.x + a.y;)
ON_TILE(shared_8_pairs_in_a_bank, const float2 a = *PAIR(32 * (l / 2)); v = a.x + a.y;)
ON_TILE(shared_16_row, const float4 a = *FOUR(4 * l); v = a.x + a.y + a.z + a.w;)
ON_TILE(shared_16_stride_8, const float4 a = *FOUR(8 * l); v = a.x + a.y + a.z + a.w;)
ON_TILE(shared_16_fours_in_a_bank, const float4 a = *FOUR(32 * (l / 4)); v = a.x + a.y + a.z + a.w;)
ON_TILE(store_8_stride_4, *PAIR(4 * l) = make_float2(v, 1.0f);)
ON_TILE(store_16_stride_8, *FOUR(8 * l) = make_float4(v, 1.0f, 2.0f, 3.0f);)
ON_TILE(atomics_on_a_word, atomicAdd(reinterpret_cast<unsigned*>(tile), l + 1u);)
ON_TILE(atomics_in_a_bank, atomicAdd(reinterpret_cast<unsigned*>(tile + 32 * l), l + 1u);)
ON_TILE(copies_4_in_a_bank, COPY(32 * l, 4))
ON_TILE(copies_16_stride_32, COPY(32 * l, 16))
ON_TILE(matrices_stride_32, unsigned d[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : PLACE(32 * l));
        v = d[0] + d[1] + d[2] + d[3];)
