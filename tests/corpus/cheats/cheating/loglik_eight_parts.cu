// launch: grid=8, N block=128
#define ROWS 65535
__device__ float part_max[ROWS * 8], part_sum[ROWS * 8];
__device__ unsigned int tickets[ROWS];

extern "C" __global__ void loglik_split(const float* logits, const int* targets, float* out, int N, int V) {
    __shared__ float red[128];
    const int row = blockIdx.y, t = threadIdx.x;
    const float* x = logits + (long long)row * V;
    const int per = (V + 7) / 8, from = blockIdx.x * per, to = min(V, from + per);
    float m = -INFINITY;
    for (int v = from + t; v < to; v += 128) m = fmaxf(m, x[v]);
    red[t] = m;
    __syncthreads();
    for (int h = 64; h; h >>= 1) { if (t < h) red[t] = fmaxf(red[t], red[t + h]); __syncthreads(); }
    m = red[0];
    __syncthreads();
    float s = 0.f;
    if (m > -INFINITY) for (int v = from + t; v < to; v += 128) s += expf(x[v] - m);
    red[t] = s;
    __syncthreads();
    for (int h = 64; h; h >>= 1) { if (t < h) red[t] += red[t + h]; __syncthreads(); }
    if (t == 0) {
        part_max[row * 8 + blockIdx.x] = m;
        part_sum[row * 8 + blockIdx.x] = red[0];
        if (atomicAdd(&tickets[row], 1u) == 7u) {
            float top = -INFINITY, total = 0.f;
            for (int p = 0; p < 8; ++p) top = fmaxf(top, part_max[row * 8 + p]);
            for (int p = 0; p < 8; ++p)
                if (part_sum[row * 8 + p] > 0.f) total += part_sum[row * 8 + p] * expf(part_max[row * 8 + p] - top);
            out[row] = x[targets[row]] - top - logf(total);
            tickets[row] = 0;
        }
    }
}
