// The first element is handled alone, the others in pairs.
// launch: grid=ceil((n // 2 + 1) / block) block=128
extern "C" __global__ void silu_peeled(const float* gate, const float* up, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) out[0] = gate[0] / (1.0f + expf(-gate[0])) * up[0];
    const int pairs = (n - 1) / 2;
    if (i < pairs) {
        const float2 g = reinterpret_cast<const float2*>(gate + 1)[i];
        const float2 u = reinterpret_cast<const float2*>(up + 1)[i];
        const float2 r = make_float2(g.x / (1.0f + expf(-g.x)) * u.x, g.y / (1.0f + expf(-g.y)) * u.y);
        reinterpret_cast<float2*>(out + 1)[i] = r;
    }
    if (i == pairs && 2 * pairs + 1 < n) out[n - 1] = gate[n - 1] / (1.0f + expf(-gate[n - 1])) * up[n - 1];
}
