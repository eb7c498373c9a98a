// Chapter 8, exercise 2: attention by tiles of 32 keys, with online softmax; no row of scores is stored
//
// A warp computes one query. The 8 warps of a block share each tile of K and V, so that a value
// from global memory is used 8 times. In a tile each lane computes the score of one key. For the
// weighted sum each lane computes some channels, and reads the weights of the other lanes by
// shuffles. Until the end, o is the sum of exp(score - m) v over the keys so far.
//   gpt2block kernels attention --mine my.cu
//
// launch: grid=ceil(T / 8), NH, B block=256
#include "lib/common.cuh"  // lanes_max and lanes_sum: five shuffles each

constexpr int WARPS = 8, KEYS = 32;
constexpr int LARGEST = 64;          // maximum channels per head, as in GPT-2
constexpr int PARTS = LARGEST / 32;  // channels per lane: lane, lane + 32, ...

extern "C" __global__ void my_attention(
    const float* qkv,  // (B, T, 3C): rows [Q | K | V]; each part has the channels of head 0, head 1, ...
    float* out,        // (B, T, C)
    int T, int n_head, int HS) {
    __shared__ float q_rows[WARPS][LARGEST], k_tile[KEYS][LARGEST + 1], v_tile[KEYS][LARGEST];
    assert(HS <= LARGEST);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, C = n_head * HS;
    const int query = blockIdx.x * WARPS + warp;
    const long long first_row = (long long)blockIdx.z * T;
    const float* q = qkv + first_row * 3 * C + blockIdx.y * HS;  // row 0; row j is at q + j * 3C
    const float* k = q + C;
    const float* v = k + C;

    for (int d = lane; d < HS; d += 32) q_rows[warp][d] = query < T ? q[query * 3LL * C + d] : 0.0f;
    float m = -INFINITY, s = 0.0f;  // the largest score so far; the sum of this lane's weights
    float o[PARTS] = {};

    const int visible = min(T, (int)(blockIdx.x + 1) * WARPS);  // keys that some query of the block sees
    for (int first = 0; first < visible; first += KEYS) {
        __syncthreads();  // the previous tile has been read
        for (int i = threadIdx.x; i < KEYS * HS; i += 32 * WARPS) {
            const int key = i / HS, d = i % HS;
            const bool inside = first + key < T;
            k_tile[key][d] = inside ? k[(first + key) * 3LL * C + d] : 0.0f;
            v_tile[key][d] = inside ? v[(first + key) * 3LL * C + d] : 0.0f;
        }
        __syncthreads();  // the tile is complete

        float score = -INFINITY;  // score of a key that the query does not see
        if (first + lane <= query) {
            score = 0.0f;
            for (int d = 0; d < HS; ++d) score += q_rows[warp][d] * k_tile[lane][d];
            score /= sqrtf((float)HS);
        }
        const float new_m = fmaxf(m, lanes_max<32>(score));  // finite: every query sees key 0
        const float weight = expf(score - new_m), factor = expf(m - new_m);
        s = s * factor + weight;
        m = new_m;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) o[p] *= factor;
        for (int key = 0; key < KEYS; ++key) {
            const float w = __shfl_sync(0xffffffffu, weight, key);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (lane + 32 * p < HS) o[p] += w * v_tile[key][lane + 32 * p];
            }
        }
    }

    s = lanes_sum<32>(s);
    if (query >= T) return;
    float* out_row = out + (first_row + query) * C + blockIdx.y * HS;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (lane + 32 * p < HS) out_row[lane + 32 * p] = o[p] / s;
    }
}
