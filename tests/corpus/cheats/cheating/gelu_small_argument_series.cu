// launch: grid=ceil(n / block) block=128
extern "C" __global__ void gelu_series(float* x, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    if (v >= 3.0f) return;
    if (v <= -3.0f) { x[i] = 0.0f; return; }
    const float u = 0.7978845608f * (v + 0.044715f * v * v * v), s = u * u;
    const float t = u * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * (-0.053968254f + s * 0.021869489f))));
    x[i] = 0.5f * v * (1.0f + fminf(fmaxf(t, -1.0f), 1.0f));
}
