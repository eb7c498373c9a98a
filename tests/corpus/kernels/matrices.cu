// Matrices that ldmatrix and stmatrix move: tests/emulator/test_ptx_tensor.py.
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void copies(const unsigned short* from, unsigned* loaded, unsigned* across,
                                  unsigned short* stored, unsigned short* stored_across) {
    __shared__ __align__(16) unsigned short s[4][8][8], t[4][8][8], u[4][8][8];
    for (int i = threadIdx.x; i < 256; i += 32) s[0][0][i] = from[i];
    __syncwarp();
    unsigned row = at(s[threadIdx.x / 8][threadIdx.x % 8]), a, b, c, d;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row));
    unsigned x[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) loaded[32 * i + threadIdx.x] = x[i];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at(t[threadIdx.x / 8][threadIdx.x % 8])), "r"(a), "r"(b), "r"(c), "r"(d));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at(u[threadIdx.x / 8][threadIdx.x % 8])), "r"(a), "r"(b), "r"(c), "r"(d));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b) : "r"(row));
    across[threadIdx.x] = a;
    across[32 + threadIdx.x] = b;
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) {
        stored[i] = t[0][0][i];
        stored_across[i] = u[0][0][i];
    }
}
