// launch: grid=ceil(n / 1024) block=256
extern "C" __global__ void gelu_registers(float* x, long long n) {
    const long long first = (long long)blockIdx.x * 1024 + threadIdx.x;
    float v[4];
    int got = 0;
    for (long long i = first; i < n && got < 4; i += 256) v[got++] = x[i];
    while (got-- > 0) {
        const float u = v[got], u2 = u * u;
        x[first + got * 256] = 0.5f * u + 0.5f * u * tanhf(u * (0.7978845608f + 0.0356774081f * u2));
    }
}
