// Chapter 9, exercise 3: attention; four warps share the keys of a query, and their splits are merged
//
// A warp takes every fourth key. It keeps the largest score m, the sum l of exp(score - m) and, in its
// lanes, the sum o of these weights times V: when m grows, l and o are scaled by exp(old m - new m).
//   gpt2block kernels attention --mine my.cu
//
// launch: grid=T, NH, B block=128
#include "lib/common.cuh"  // INFINITY
#include "lib/storage.cuh"

#define WARPS 4
#define MAX_CHANNELS 4  // maximum channels per lane, for heads of up to 128 channels

extern "C" __global__ void my_attention(
    const T* qkv,  // (B, T, 3C): rows [Q | K | V]; each part has the channels of head 0, head 1, ...
    T* out,        // (B, T, C)
    int seq_len, int n_head, int HS) {
    __shared__ float m_of[WARPS], l_of[WARPS], o_of[WARPS][32 * MAX_CHANNELS];
    const int i = blockIdx.x, head = blockIdx.y, C = n_head * HS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T* rows = qkv + blockIdx.z * (long long)seq_len * 3 * C + head * HS;
    const T* q = rows + i * 3LL * C;
    assert(HS <= 32 * MAX_CHANNELS);

    float m = -INFINITY, l = 0.0f, o[MAX_CHANNELS] = {};
    for (int j = warp; j <= i; j += WARPS) {
        const T* k = rows + j * 3LL * C + C;
        const T* v = k + C;
        float score = 0.0f;
        for (int d = lane; d < HS; d += 32) score += widen(q[d]) * widen(k[d]);
        for (int distance = 16; distance > 0; distance /= 2) {
            score += __shfl_xor_sync(0xffffffffu, score, distance);
        }
        score /= sqrtf((float)HS);

        const float largest = fmaxf(m, score);
        const float before = expf(m - largest), weight = expf(score - largest);  // expf(-INFINITY) is 0
        m = largest;
        l = l * before + weight;
#pragma unroll
        for (int c = 0; c < MAX_CHANNELS; ++c) {
            const int d = 32 * c + lane;
            if (d < HS) o[c] = o[c] * before + weight * widen(v[d]);
        }
    }

    if (lane == 0) m_of[warp] = m, l_of[warp] = l;
#pragma unroll
    for (int c = 0; c < MAX_CHANNELS; ++c) o_of[warp][32 * c + lane] = o[c];
    __syncthreads();

    float largest = m_of[0];  // finite: every query sees key 0, a key of warp 0
    for (int p = 1; p < WARPS; ++p) largest = fmaxf(largest, m_of[p]);
    for (int d = threadIdx.x; d < HS; d += 32 * WARPS) {
        float sum = 0.0f, weighted = 0.0f;
        for (int p = 0; p < WARPS; ++p) {
            const float scale = expf(m_of[p] - largest);  // 0 for a warp without a key
            sum += scale * l_of[p];
            weighted += scale * o_of[p][d];
        }
        out[(blockIdx.z * (long long)seq_len + i) * C + head * HS + d] = narrow(weighted / sum);
    }
}
