// launch: grid=ceil(C / 32), ceil(T / 8), B block=32, 8
extern "C" __global__ void encoder_3d(const int* ids, const float* wte, const float* wpe, float* out, int T, int C,
                                      int V) {
    const int c = blockIdx.x * 32 + threadIdx.x;
    const int t = blockIdx.y * 8 + threadIdx.y;
    const int b = blockIdx.z;
    if (c >= C || t >= T) return;
    const long long position = (long long)b * T + t;
    const int token = ids[position];
    assert(token >= 0 && token < V);
    out[position * C + c] = wte[(long long)token * C + c] + wpe[(long long)t * C + c];
}
