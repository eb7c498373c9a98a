// launch: grid=N block=64
extern "C" __global__ void layernorm_double(const float* x, const float* gamma, const float* beta, float* out,
                                            float eps, int N, int C) {
    __shared__ double s1[64], s2[64];
    const int t = threadIdx.x;
    const float* row = x + (long long)blockIdx.x * C;
    double a = 0.0, b = 0.0;
    for (int c = t; c < C; c += 64) {
        const double v = row[c];
        a += v;
        b += v * v;
    }
    s1[t] = a;
    s2[t] = b;
    __syncthreads();
    for (int half = 32; half >= 1; half /= 2) {
        if (t < half) {
            s1[t] += s1[t + half];
            s2[t] += s2[t + half];
        }
        __syncthreads();
    }
    const double mean = s1[0] / C;
    const double var = fmax(s2[0] / C - mean * mean, 0.0);
    const float scale = (float)(1.0 / sqrt(var + (double)eps));
    for (int c = t; c < C; c += 64) {
        out[(long long)blockIdx.x * C + c] = (float)(row[c] - mean) * scale * gamma[c] + beta[c];
    }
}
