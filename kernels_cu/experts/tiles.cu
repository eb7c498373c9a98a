// The choices of experts, sorted into tiles of one expert each, and the weighted sum of the experts' results.
//
//   routes (M, 2 K) of experts/route.cu: numbers of each row's experts, as floats, then their weights. Choice k of row
//   m has the number m K + k
//
//   tiles (T, 1 + places): a tile has the number of an expert, and the numbers of up to `places` of its choices, in
//   ascending order. Tiles are in ascending order of experts. -1 stands for a missing choice; tiles after the last one
//   are -1
//
//   expert_tiles: one block per expert. Each block counts the choices of all experts, which gives the place of its
//       first tile, and then writes its choices in their order. A warp has neighbouring choices
//   add_experts: out[m] = residual[m] + (weight 0 y[m K] + weight 1 y[m K + 1] + ...), in the order of the choices; one
//       thread per vector of columns
//
// Counts are integers, so the order of atomic additions does not show in the result.
//
// expert_tiles: grid (E), block (any multiple of 32, up to 512), E ints of dynamic shared memory. add_experts: grid
// (M, ceil(N / ADD_WIDTH / 256)), block (256).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"

#ifndef ADD_WIDTH  // columns per thread of add_experts: 1, 2 or 4
#define ADD_WIDTH 4
#endif
#ifndef EXPERTS_USED  // experts that each row uses
#define EXPERTS_USED 8
#endif

constexpr int BATCH = 8;  // loads in flight per thread of expert_tiles

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// Calls use(choice, expert) for the choices from `begin` to `end` - 1, by all lanes of a warp. The last calls of some
// lanes have expert -1.
template <typename Use>
__device__ __forceinline__ void each_choice(const float* routes, int begin, int end, Use use) {
    for (int first = begin; first < end; first += 32 * BATCH) {
        int experts[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int c = first + 32 * i + threadIdx.x % 32;
            const float* const from = routes + c / EXPERTS_USED * 2 * EXPERTS_USED + c % EXPERTS_USED;
            experts[i] = c < end ? (int)__ldcg(from) : -1;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) use(first + 32 * i + threadIdx.x % 32, experts[i]);
    }
}

// Launched by operation (variant): expert_tiles (experts sorted)
extern "C" __global__ void __launch_bounds__(512) expert_tiles(
    const float* routes,  // (M, 2 EXPERTS_USED)
    int* tiles,           // (T, 1 + places)
    int choices, int E, int places, int T) {
    extern __shared__ int counts[];  // (E)
    __shared__ int of_warp[512 / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = blockIdx.x, pitch = 1 + places;
    const int each = (choices + blockDim.x - 1) / blockDim.x * 32;
    const int begin = warp * each, after = min(begin + each, choices);  // the warp's choices are neighbours
    let_next_start();
    for (int e = threadIdx.x; e < E; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    wait_for_previous();
    int found = 0;  // choices of the warp that are of the block's expert
    each_choice(routes, begin, after, [&](int, int e) {
        if (e >= 0 && e < E) atomicAdd(counts + e, 1);
        found += __popc(__ballot_sync(0xffffffffu, e == own));
    });
    if (lane == 0) of_warp[warp] = found;
    __syncthreads();
    int first = 0, all = 0;  // the expert's first tile, and the number of tiles of all experts
    for (int e = lane; e < E; e += 32) {
        const int of_expert = (counts[e] + places - 1) / places;
        all += of_expert;
        if (e < own) first += of_expert;
    }
    first = warp_sum(first), all = warp_sum(all);

    const int count = counts[own], end = (count + places - 1) / places * places;
    int* const to = tiles + (long long)first * pitch;
    int place = warp_sum(lane < warp ? of_warp[lane] : 0);
    if (found) {
        each_choice(routes, begin, after, [&](int c, int e) {
            const unsigned votes = __ballot_sync(0xffffffffu, e == own);
            const int at = place + __popc(votes & ((1u << lane) - 1));
            if (e == own) to[at / places * pitch + 1 + at % places] = c;
            place += __popc(votes);
        });
    }
    for (int i = count + threadIdx.x; i < end; i += blockDim.x) to[i / places * pitch + 1 + i % places] = -1;
    for (int i = threadIdx.x; i < end / places; i += blockDim.x) to[i * pitch] = own;
    const long long last = (long long)T * pitch, step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)all * pitch + blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < last; i += step) tiles[i] = -1;
}

// Launched by operation (variant): add_experts (experts added)
extern "C" __global__ void __launch_bounds__(256) add_experts(
    const float* y,         // (M EXPERTS_USED, N)
    const float* routes,    // (M, 2 EXPERTS_USED)
    const float* residual,  // (M, N); may be out
    float* out,             // (M, N)
    int N) {
    const int m = blockIdx.x, n = (blockIdx.y * blockDim.x + threadIdx.x) * ADD_WIDTH;
    let_next_start();
    wait_for_previous();
    if (n >= N) return;
    const long long at = (long long)m * N + n;
    float total[ADD_WIDTH] = {}, v[ADD_WIDTH];
#pragma unroll
    for (int k = 0; k < EXPERTS_USED; ++k) {
        const float weight = __ldcg(routes + (2LL * m + 1) * EXPERTS_USED + k);
        load_fresh<float, ADD_WIDTH>(y + ((long long)m * EXPERTS_USED + k) * N + n).unpack(v);
#pragma unroll
        for (int i = 0; i < ADD_WIDTH; ++i) total[i] = fmaf(weight, v[i], total[i]);
    }
    load_fresh<float, ADD_WIDTH>(residual + at).unpack(v);
#pragma unroll
    for (int i = 0; i < ADD_WIDTH; ++i) v[i] += total[i];
    Vec<float, ADD_WIDTH>::store(out + at, v);
}
