// Lines that one warp executes with t = threadIdx.x, x and out of 4,096 floats, each followed by all counters that are
// not 0, except for numbers of instructions. Lines before them define the macros.
__noinline__ __device__ float called(float v) { return v + 1; }
#define AT(p) "r"((unsigned)__cvta_generic_to_shared(p))
#define COPY(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: AT(to), "l"(from))
#define MATRICES(d, row) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : AT(row))
// lines
v = x[t];  // load_requests=1 load_sectors=4 load_bytes=128
v = x[t + 1];  // load_requests=1 load_sectors=5 load_bytes=128
v = x[32 * t];  // load_requests=1 load_sectors=32 load_bytes=128
v = x[8 * (t / 8)];  // load_requests=1 load_sectors=4 load_bytes=128
v = ((float4*)x)[t].w + ((float4*)x)[t].x;  // load_requests=1 load_sectors=16 load_bytes=512
v = ((char*)x)[t];  // load_requests=1 load_sectors=1 load_bytes=32
if (t < 3) v = x[8 * t];  // load_requests=1 load_sectors=3 load_bytes=12 branches=1
out[2 * t] = 1;  // store_requests=1 store_sectors=8 store_bytes=128
((float2*)out)[t] = {1, 2};  // store_requests=1 store_sectors=8 store_bytes=256
atomicAdd(out, v);  // atomics=1
v = tile[t];  // shared_requests=1
v = tile[5];  // shared_requests=1
v = tile[2 * t];  // shared_requests=1 bank_conflicts=1
v = tile[32 * t];  // shared_requests=1 bank_conflicts=31
v = tile[33 * t];  // shared_requests=1
v = *(double*)&tile[2 * t];  // shared_requests=1
v = *(double*)&tile[4 * t];  // shared_requests=1 bank_conflicts=2
*(float4*)&tile[4 * t] = float4();  // shared_requests=1
*(float4*)&tile[8 * t] = float4();  // shared_requests=1 bank_conflicts=4
atomicAdd(&tile[16 * t], v);  // atomics=1 shared_requests=1 bank_conflicts=15
MATRICES(d, tile + 4 * t);  // shared_requests=1
MATRICES(d, tile + 32 * t);  // shared_requests=1 bank_conflicts=28
COPY(tile + 4 * t, x + 4 * t);  // load_requests=1 load_sectors=16 copied_bytes=512 shared_requests=1
COPY(tile + 32 * t, x + 4 * t);  // load_requests=1 load_sectors=16 copied_bytes=512 shared_requests=1 bank_conflicts=28
v = *(double*)&tile[32 * (t / 2)];  // shared_requests=1 bank_conflicts=15
own[n & 7] = v;  // local_bytes=128
v = called(v);  //
v = __shfl_xor_sync(~0u, v, 1) + __shfl_xor_sync(~0u, v, 2);  // shuffles=2
__syncthreads();  // barriers=1
_Pragma("unroll 1") for (int k = 0; k < n; ++k) v += __sinf(v);  // branches=6 uniform_branches=6
_Pragma("unroll 1") for (int k = 0; k < t; ++k) v += __sinf(v);  // branches=32 uniform_branches=1
