// launch: grid=4, N block=128
#define CAP 4096
struct State { int lock, merged; float top, sum; };
__device__ State states[CAP];

extern "C" __global__ void loglik_locked(const float* logits, const int* targets, float* out, int N, int V) {
    __shared__ float red[128];
    const int row = blockIdx.y, t = threadIdx.x;
    const bool shared_row = row < CAP;
    if (!shared_row && blockIdx.x) return;
    const float* x = logits + (long long)row * V;
    const int stride = shared_row ? 512 : 128, begin = shared_row ? blockIdx.x * 128 + t : t;
    float m = -INFINITY;
    for (int v = begin; v < V; v += stride) m = fmaxf(m, x[v]);
    red[t] = m;
    __syncthreads();
    for (int h = 64; h; h >>= 1) { if (t < h) red[t] = fmaxf(red[t], red[t + h]); __syncthreads(); }
    m = red[0];
    __syncthreads();
    float s = 0.f;
    if (m > -INFINITY) for (int v = begin; v < V; v += stride) s += expf(x[v] - m);
    red[t] = s;
    __syncthreads();
    for (int h = 64; h; h >>= 1) { if (t < h) red[t] += red[t + h]; __syncthreads(); }
    if (t != 0) return;
    s = red[0];
    if (!shared_row) { out[row] = x[targets[row]] - m - logf(s); return; }
    volatile State* st = &states[row];
    while (atomicCAS(&states[row].lock, 0, 1) != 0) { }
    __threadfence();
    const int before = st->merged;
    if (before > 0 && st->sum > 0.f) {
        const float top = fmaxf(m, st->top);
        s = (s > 0.f ? s * expf(m - top) : 0.f) + st->sum * expf(st->top - top);
        m = top;
    }
    st->top = m;
    st->sum = s;
    st->merged = before == 3 ? 0 : before + 1;
    if (before == 3) out[row] = x[targets[row]] - m - logf(s);
    __threadfence();
    atomicExch(&states[row].lock, 0);
}
