// Kernels with one mistake each. The line above a kernel: a regular expression of the finding. "#line 1" numbers the
// lines of a kernel from 1.

// says: out of bounds: thread \(0, 0, 0\) .* line 1, writes 4 bytes at byte 4000 of out
#line 1
extern "C" __global__ void k0(const float* x, float* out, int n) { out[n + threadIdx.x] = 1.0f; }

// says: out of bounds: thread \(0, 0, 0\) .* at byte -4 of out
#line 1
extern "C" __global__ void k1(const float* x, float* out, int n) { out[(int)threadIdx.x - 1] = 1.0f; }

// says: out of bounds: .* line 2, reads 4 bytes at byte 4000 of local memory
#line 1
extern "C" __global__ void k2(const float* x, float* out, int n) { float a[4]; for (int i = 0; i < 4; ++i) a[i] = x[i];
out[0] = a[n]; }

// says: misaligned: thread \(1, 0, 0\)
#line 1
extern "C" __global__ void k3(const float* x, float* out, int n) { *(float2*)(out + threadIdx.x) = make_float2(0, 0); }

// says: race: thread \(1, 0, 0\) of block \(0, 0, 0\), line 1, writes out\[0\]; thread \(0, 0, 0\) of block \(0, 0, 0\), line 1, wrote it
#line 1
extern "C" __global__ void k4(const float* x, float* out, int n) { out[0] = x[threadIdx.x]; }

// says: race: thread \(32, 0, 0\) .* line 2, writes out\[0\]; .* line 1, atomically changed it
#line 1
extern "C" __global__ void k5(const float* x, float* out, int n) { if (threadIdx.x == 0) atomicAdd(out, x[0]);
if (threadIdx.x == 32) out[0] = 1.0f; }

// says: barrier: thread \(0, 0, 0\) .* line 2: other threads never reach it; thread \(32, 0, 0\)
#line 1
extern "C" __global__ void k6(const float* x, float* out, int n) { if (threadIdx.x < 32)
__syncthreads();
out[threadIdx.x] = 1.0f; }

// says: barrier: .*threads wait at different barriers; .* line [12]
#line 1
extern "C" __global__ void k7(const float* x, float* out, int n) { if (threadIdx.x < 32) __syncthreads(); else
__syncthreads(); }

// says: mask: .* line 2: the mask does not name the lane that executes the instruction
#line 1
extern "C" __global__ void k8(const float* x, float* out, int n) { if (threadIdx.x % 2)
__syncwarp(0x1u); out[0] = 1.0f; }

// says: endless: .* budget
#line 1
extern "C" __global__ void k9(const float* x, float* out, int n) { while (x[0] != 12345.0f) out[1000 - threadIdx.x - 1] += 1.0f; }

// says: division: .* divided by zero
#line 1
extern "C" __global__ void k10(const float* x, float* out, int n) { out[0] = n / (int)(threadIdx.x / 64); }

// says: assert: thread \(3, 0, 0\) .* threadIdx\.x != 3
#line 1
extern "C" __global__ void k11(const float* x, float* out, int n) { assert(threadIdx.x != 3); }

// says: trap: thread \(5, 0, 0\)
#line 1
extern "C" __global__ void k12(const float* x, float* out, int n) { if (threadIdx.x == 5) __trap(); }

// says: endless: .* line 2
#line 1
extern "C" __global__ void k13(const float* x, float* out, int n) { __shared__ int lock; if (threadIdx.x == 0) lock = 1; __syncthreads();
while (atomicCAS(&lock, 0, 1) != 0) {} }

// says: read-only: .* line 2, reads out\[40\]; .* line 1, wrote it: the read-only cache may hold
#line 1
extern "C" __global__ void k14(const float* x, float* out, int n) { out[threadIdx.x] = 1.0f; __syncthreads();
out[threadIdx.x + 64] = __ldg(out + n % 64); }

// says: barrier: .* line 2: other threads never reach it
#line 1
extern "C" __global__ void k15(const float* x, float* out, int n) { __shared__ float s[64]; s[threadIdx.x] = x[0];
asm volatile("bar.sync 1, 96;"); }
