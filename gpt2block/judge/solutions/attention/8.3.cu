// Chapter 8, exercise 3: attention by tiles of 32 keys, with QUERIES queries for each warp
//
// The kernel of exercise 2, coarsened as in chapter 5: a value of K or V that a lane reads from
// shared memory is used for QUERIES queries, and a tile for 8 * QUERIES queries. Each query has
// its own m, s and o, all in registers.
//   gpt2block kernels attention --mine my.cu
//
// launch: grid=ceil(T / 32), NH, B block=256
#include "lib/common.cuh"  // lanes_max and lanes_sum: five shuffles each

constexpr int WARPS = 8, KEYS = 32, QUERIES = 4;  // 32 in the launch line is WARPS * QUERIES
constexpr int LARGEST = 64;          // maximum channels per head, as in GPT-2
constexpr int PARTS = LARGEST / 32;  // channels per lane: lane, lane + 32, ...

extern "C" __global__ void my_attention(
    const float* qkv,  // (B, T, 3C): rows [Q | K | V]; each part has the channels of head 0, head 1, ...
    float* out,        // (B, T, C)
    int T, int n_head, int HS) {
    __shared__ float q_rows[WARPS * QUERIES][LARGEST], k_tile[KEYS][LARGEST + 1], v_tile[KEYS][LARGEST];
    assert(HS <= LARGEST);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, C = n_head * HS;
    const int query = (blockIdx.x * WARPS + warp) * QUERIES;  // first query of the warp
    const long long first_row = (long long)blockIdx.z * T;
    const float* q = qkv + first_row * 3 * C + blockIdx.y * HS;  // row 0; row j is at q + j * 3C
    const float* k = q + C;
    const float* v = k + C;

    float(*q_own)[LARGEST] = q_rows + warp * QUERIES;
    for (int r = 0; r < QUERIES; ++r) {
        for (int d = lane; d < HS; d += 32) q_own[r][d] = query + r < T ? q[(query + r) * 3LL * C + d] : 0.0f;
    }
    float m[QUERIES], s[QUERIES] = {};  // the largest score so far; the sum of this lane's weights
    float o[QUERIES][PARTS] = {};
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) m[r] = -INFINITY;

    const int visible = min(T, (int)(blockIdx.x + 1) * WARPS * QUERIES);  // keys that some query of the block sees
    for (int first = 0; first < visible; first += KEYS) {
        __syncthreads();  // the previous tile has been read
        for (int i = threadIdx.x; i < KEYS * HS; i += 32 * WARPS) {
            const int key = i / HS, d = i % HS;
            const bool inside = first + key < T;
            k_tile[key][d] = inside ? k[(first + key) * 3LL * C + d] : 0.0f;
            v_tile[key][d] = inside ? v[(first + key) * 3LL * C + d] : 0.0f;
        }
        __syncthreads();  // the tile is complete

        float score[QUERIES] = {};
        for (int d = 0; d < HS; ++d) {
            const float k_value = k_tile[lane][d];  // one load for all queries
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) score[r] += q_own[r][d] * k_value;
        }
        float weight[QUERIES];
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
            const float visible_score = first + lane <= query + r ? score[r] / sqrtf((float)HS) : -INFINITY;
            const float new_m = fmaxf(m[r], lanes_max<32>(visible_score));  // finite: every query sees key 0
            const float factor = expf(m[r] - new_m);
            weight[r] = expf(visible_score - new_m);
            s[r] = s[r] * factor + weight[r];
            m[r] = new_m;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) o[r][p] *= factor;
        }
        for (int key = 0; key < KEYS; ++key) {
            float values[PARTS];  // one load for all queries
#pragma unroll
            for (int p = 0; p < PARTS; ++p) values[p] = lane + 32 * p < HS ? v_tile[key][lane + 32 * p] : 0.0f;
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) {
                const float w = __shfl_sync(0xffffffffu, weight[r], key);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) o[r][p] += w * values[p];
            }
        }
    }

#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
        const float sum = lanes_sum<32>(s[r]);
        if (query + r >= T) continue;
        float* out_row = out + (first_row + query + r) * C + blockIdx.y * HS;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (lane + 32 * p < HS) out_row[lane + 32 * p] = o[r][p] / sum;
        }
    }
}
