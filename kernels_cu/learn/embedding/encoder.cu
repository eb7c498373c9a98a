// Token plus position embedding: out[b, t] = wte[ids[b, t]] + wpe[t].
//
//   ids (B, T) of int, wte (V, C), wpe (n_ctx, C) with n_ctx >= T, out (B, T, C); rows = B * T
//
// The kernels have the names of llm.c's encoder kernels. Each variant adds one idea to the previous one:
//
//   encoder_forward_kernel1: one thread per element
//   encoder_forward_kernel2: one thread per 4 channels, 16-byte loads and stores
//   encoder_forward_kernel3: one warp per row, several 16-byte loads in flight. The id is read and the address computed
//       once per row. Neighbouring warps process the same position of different sequences, so they share its row of wpe
//       in the L1 cache
//
// The kernels are memory-bound: each token reads a row of wte and writes a row of out. For an id outside 0..V-1, no row
// of wte is read, and the row of out becomes NaN.
constexpr int ENCODER_LOADS = 4;  // loads of wte that a lane of encoder_forward_kernel3 issues at once

__device__ bool known(int id, int V) { return 0 <= id && id < V; }

__device__ float not_a_number() { return __int_as_float(0x7fffffff); }

__device__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// launch: grid=ceil(rows * C / block) block=256
extern "C" __global__ void encoder_forward_kernel1(
    const int* __restrict__ ids,    // (B, T)
    const float* __restrict__ wte,  // (V, C)
    const float* __restrict__ wpe,  // (n_ctx, C)
    float* __restrict__ out,        // (B, T, C)
    int rows, int T, int C, int V) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)rows * C) return;
    const int row = i / C, c = i % C, t = row % T, id = ids[row];
    out[i] = known(id, V) ? wte[(long long)id * C + c] + wpe[(long long)t * C + c] : not_a_number();
}

// C must be a multiple of 4, and rows aligned to 16 bytes.
// launch: grid=ceil(rows * C / 4 / block) block=256
extern "C" __global__ void encoder_forward_kernel2(
    const int* __restrict__ ids,    // (B, T)
    const float* __restrict__ wte,  // (V, C)
    const float* __restrict__ wpe,  // (n_ctx, C)
    float* __restrict__ out,        // (B, T, C)
    int rows, int T, int C, int V) {
    const int packs = C / 4;  // number of float4 per row
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)rows * packs) return;
    const int row = i / packs, p = i % packs, t = row % T, id = ids[row];
    const float nan = not_a_number();
    float4 sum = make_float4(nan, nan, nan, nan);
    if (known(id, V)) {
        sum = add(reinterpret_cast<const float4*>(wte)[(long long)id * packs + p],
                  reinterpret_cast<const float4*>(wpe)[(long long)t * packs + p]);
    }
    reinterpret_cast<float4*>(out)[i] = sum;
}

// C must be a multiple of 4, and rows aligned to 16 bytes. Any block of a multiple of 32 threads.
// launch: grid=ceil(rows * 32 / block) block=256
extern "C" __global__ void encoder_forward_kernel3(
    const int* __restrict__ ids,    // (B, T)
    const float* __restrict__ wte,  // (V, C)
    const float* __restrict__ wpe,  // (n_ctx, C)
    float* __restrict__ out,        // (B, T, C)
    int rows, int T, int C, int V) {
    const int packs = C / 4, lane = threadIdx.x % 32;
    const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (warp >= rows) return;
    const int B = rows / T, t = warp / B, row = warp % B * T + t;
    const int id = ids[row];
    const bool inside = known(id, V);
    const float4* token = reinterpret_cast<const float4*>(wte) + (long long)(inside ? id : 0) * packs;
    const float4* position = reinterpret_cast<const float4*>(wpe) + (long long)t * packs;
    float4* y = reinterpret_cast<float4*>(out) + (long long)row * packs;
    const float nan = not_a_number();

    for (int first = lane; first < packs; first += 32 * ENCODER_LOADS) {
        float4 a[ENCODER_LOADS], b[ENCODER_LOADS];
#pragma unroll
        for (int i = 0; i < ENCODER_LOADS; ++i) {
            const int p = first + 32 * i;
            if (p < packs) a[i] = token[p], b[i] = position[p];
        }
#pragma unroll
        for (int i = 0; i < ENCODER_LOADS; ++i) {
            const int p = first + 32 * i;
            if (p < packs) y[p] = inside ? add(a[i], b[i]) : make_float4(nan, nan, nan, nan);
        }
    }
}
