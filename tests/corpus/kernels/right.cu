// Right kernels, as strangers write them. The line above a kernel: launch settings and the NumPy expression of what it
// writes to the first elements of out.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace cg = cooperative_groups;

extern __shared__ float at_file_scope[];
static __constant__ float weights[3] = {0.25f, 0.5f, 0.25f};
__device__ unsigned arrived = 0;

// grid=3 block=64 right=2*x
extern "C" __global__ void grid_stride(const float* __restrict__ x, float* out, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = 2.0f * __ldg(x + i);
}

// block=64 right=[x[32],x[0]]
extern "C" __global__ void spin_on_other_warp(const float* x, float* out, int n) {
    __shared__ volatile int flags[2];
    __shared__ float data[2];
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < 2) flags[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        data[warp] = x[threadIdx.x];
        __threadfence_block();
        flags[warp] = 1;
        while (flags[1 - warp] == 0) {}
        __threadfence_block();
        out[warp] = data[1 - warp];
    }
}

// block=256 right=[256]
extern "C" __global__ void spin_lock(const float* x, float* out, int n) {
    __shared__ int lock;
    __shared__ float sum;
    if (threadIdx.x == 0) lock = 0, sum = 0.0f;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) __nanosleep(20);
    __threadfence();
    sum += 1.0f;
    __threadfence();
    atomicExch(&lock, 0);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = sum;
}

// grid=4 block=64 right=[x[:256].sum()]
extern "C" __global__ void last_block(const float* x, float* out, int n) {
    __shared__ float s[64];
    __shared__ bool last;
    s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    for (int step = 32; step > 0; step /= 2) {
        if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        out[100 + blockIdx.x] = s[0];
        __threadfence();
        last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int b = 0; b < gridDim.x; ++b) sum += out[100 + b];
        out[0] = sum;
    }
}

// block=64 right=[64,1,0,(x[:64]>0).sum()]
extern "C" __global__ void votes_of_a_block(const float* x, float* out, int n) {
    const int some = __syncthreads_or(threadIdx.x == 5), every = __syncthreads_and(threadIdx.x != 5);
    const int all = __syncthreads_count(1), above = __syncthreads_count(x[threadIdx.x] > 0.0f);
    if (threadIdx.x == 0) out[0] = all, out[1] = some, out[2] = every, out[3] = above;
}

// block=32 right=np.arange(32)%4+(28+np.arange(32)%4)*100
extern "C" __global__ void matches(const float* x, float* out, int n) {
    const unsigned same = __match_any_sync(0xffffffffu, threadIdx.x % 4);
    int all;
    assert(__match_all_sync(0xffffffffu, 7, &all) == 0xffffffffu && all);
    out[threadIdx.x] = __ffs(same) - 1 + (31 - __clz(same)) * 100;
}

// block=32 right=np.full(32,16*31+31*1000+1e6)
extern "C" __global__ void reductions(const float* x, float* out, int n) {
    const unsigned all = 0xffffffffu, t = threadIdx.x;
    out[t] = __reduce_add_sync(all, t) + 1000 * __reduce_max_sync(all, (int)t) + 1000000 * __reduce_or_sync(all, 1u) +
             __reduce_min_sync(all, t) + __reduce_and_sync(all, t) + __reduce_xor_sync(all, t);
}

// block=32 right=np.where(np.arange(32)%2,16,0)
extern "C" __global__ void active_lanes(const float* x, float* out, int n) {
    out[threadIdx.x] = 0.0f;
    if (threadIdx.x % 2) out[threadIdx.x] = __popc(__activemask());
}

// block=32 right=np.clip(x[:32],0,1)
extern "C" __global__ void numbers(const float* x, float* out, int n) {
    const long long begin = clock64();
    const uint2 pair = make_uint2(__float_as_uint(x[threadIdx.x]), (unsigned)clock());
    const float same = __uint_as_float(pair.x);
    const bool fine = isfinite(same) && !isnan(same) && !isinf(same) && clock64() >= begin;
    out[threadIdx.x] = fine ? __saturatef(__int_as_float(__float_as_int(same))) : -1.0f;
}

// block=64 right=[x[:64].sum()]
extern "C" __global__ void tile_reduction(const float* x, float* out, int n) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> tile = cg::tiled_partition<32>(block);
    __shared__ float sums[2];
    const float sum = cg::reduce(tile, x[block.thread_rank()], cg::plus<float>());
    if (tile.thread_rank() == 0) sums[tile.meta_group_rank()] = sum;
    cg::sync(block);
    if (block.thread_rank() == 0) out[0] = sums[0] + sums[1];
}

// block=32 right=[16]
extern "C" __global__ void aggregated_atomics(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x % 2) {
        const cg::coalesced_group active = cg::coalesced_threads();
        if (active.thread_rank() == 0) atomicAdd(&count, active.size());
    }
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count;
}

// block=64 right=x[:64][::-1]
extern "C" __global__ void asynchronous_copy(const float* x, float* out, int n) {
    __shared__ alignas(16) float s[64];
    if (threadIdx.x < 16) __pipeline_memcpy_async(s + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}

// block=32,8 right=x[:992]
extern "C" __global__ void transpose_twice(const float* x, float* out, int n) {
    __shared__ float tile[32][33];
    for (int y = threadIdx.y; y < 32; y += 8) tile[threadIdx.x][y] = 32 * y + threadIdx.x < n ? x[32 * y + threadIdx.x] : 0;
    __syncthreads();
    for (int y = threadIdx.y; y < 31; y += 8) out[32 * y + threadIdx.x] = tile[threadIdx.x][y];
}

// block=64 shared=256 right=x[:64][::-1]
extern "C" __global__ void shared_at_file_scope(const float* x, float* out, int n) {
    at_file_scope[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = at_file_scope[63 - threadIdx.x];
}

// block=64 right=np.histogram(x[:64],4,(-4,4))[0]
extern "C" __global__ void histogram(const float* x, float* out, int n) {
    static __shared__ unsigned bins[4];
    if (threadIdx.x < 4) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[min(3, max(0, (int)floorf((x[threadIdx.x] + 4.0f) / 2.0f)))], 1u);
    __syncthreads();
    if (threadIdx.x < 4) out[threadIdx.x] = bins[threadIdx.x];
}

__device__ double add_by_comparison(double* address, double value) {  // as in the CUDA programming guide
    unsigned long long* bits = (unsigned long long*)address;
    unsigned long long old = *bits, assumed;
    do {
        assumed = old;
        old = atomicCAS(bits, assumed, (unsigned long long)__double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}

// block=64 right=[x[:64].sum()]
extern "C" __global__ void sum_by_comparison(const float* x, float* out, int n) {
    __shared__ double sum;
    if (threadIdx.x == 0) sum = 0.0;
    __syncthreads();
    add_by_comparison(&sum, x[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = sum;
}

// grid=4 block=64 right=[abs(x[:256]).max()]
extern "C" __global__ void maximum_by_comparison(const float* x, float* out, int n) {
    const float v = fabsf(x[64 * blockIdx.x + threadIdx.x]);
    float old = out[0], assumed;
    do {
        assumed = old;
        old = __int_as_float(atomicCAS((int*)out, __float_as_int(assumed), __float_as_int(fmaxf(assumed, v))));
    } while (old != assumed);
}

// block=64 right=[192]
extern "C" __global__ void count_by_comparison(const float* x, float* out, int n) {
    __shared__ unsigned short count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int i = 0; i < 3; ++i) {
        unsigned short old;
        do {
            old = count;
            __threadfence_block();
        } while (atomicCAS(&count, old, (unsigned short)(old + 1)) != old);
    }
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count;
}

// block=62 right=0.25*x[:62]+0.5*x[1:63]+0.25*x[2:64]
extern "C" __global__ void constants(const float* x, float* out, int n) {
    float sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < 3; ++k) sum = fmaf(weights[k], x[threadIdx.x + k], sum);
    out[threadIdx.x] = sum;
}

template <typename Op>
__device__ __forceinline__ float warp_all(float v, Op op) {
    for (int lanes = 16; lanes; lanes >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, lanes));
    return v;
}

// block=32 right=np.exp(x[:32]-x[:32].max())/np.exp(x[:32]-x[:32].max()).sum()
extern "C" __global__ void softmax_with_lambdas(const float* x, float* out, int n) {
    const float v = x[threadIdx.x], largest = warp_all(v, [](float a, float b) { return fmaxf(a, b); });
    const float e = __expf(v - largest);
    out[threadIdx.x] = __fdividef(e, warp_all(e, [](float a, float b) { return a + b; }));
}

// block=16 right=abs(x[:64])+1/np.sqrt(4)
extern "C" __global__ void vectors(const float* x, float* out, int n) {
    float4 v = reinterpret_cast<const float4*>(x)[threadIdx.x];
    const float half = rsqrtf(4.0f);
    v = make_float4(abs(v.x) + half, fabsf(v.y) + half, abs(v.z) + half, fabs(v.w) + half);
    reinterpret_cast<float4*>(out)[threadIdx.x] = v;
}

// block=64 right=np.cumsum(x[:64])
extern "C" __global__ void scan_with_two_buffers(const float* x, float* out, int n) {
    __shared__ float s[2][64];
    int now = 0;
    s[0][threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int step = 1; step < 64; step *= 2, now ^= 1) {
        s[now ^ 1][threadIdx.x] = s[now][threadIdx.x] + (threadIdx.x >= step ? s[now][threadIdx.x - step] : 0.0f);
        __syncthreads();
    }
    out[threadIdx.x] = s[now][threadIdx.x];
}

// grid=4 block=64 right=[256]
extern "C" __global__ void barrier(const float* x, float* out, int n) {  // a name of the emulator's own
    atomicAdd(&out[0], 1.0f);
}

// grid=4 block=64 right=np.float16(1.5*x[:512].astype(np.float16).astype(float)+2)
extern "C" __global__ void half_axpy(const float* __restrict__ x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const half2 a = __float2half2_rn(1.5f), c = __half2half2(__int2half_rn(2));
    const half2 y = __hfma2(a, __floats2half2_rn(x[2 * i], x[2 * i + 1]), c);
    const float2 f = __half22float2(y);
    out[2 * i] = f.x;
    out[2 * i + 1] = f.y;
}

__device__ __forceinline__ half2 warp_sum(half2 v) {
#pragma unroll
    for (int offset = warpSize / 2; offset > 0; offset >>= 1) v = __hadd2(v, __shfl_down_sync(0xffffffff, v, offset));
    return v;
}

// block=32 right=[496,992]
extern "C" __global__ void half2_shuffle(const float* x, float* out, int n) {
    const half2 sum = warp_sum(__halves2half2(__int2half_rn(threadIdx.x), __float2half(2.0f * threadIdx.x)));
    if (threadIdx.x == 0) {
        out[0] = __low2float(sum);
        out[1] = __half2float(__high2half(sum));
    }
}

// block=64 right=np.maximum(x[:64].astype(np.float16),np.float16(0))*np.float16(0.5)
extern "C" __global__ void half_relu_in_shared(const float* x, float* out, int n) {
    __shared__ half s[64];
    half* mine = s + threadIdx.x;
    *mine = x[threadIdx.x];
    *mine *= half(0.5f);
    __syncthreads();
    half v = s[threadIdx.x ^ 1];
    if (v < __float2half(0.f)) v = 0;
    s[threadIdx.x ^ 1] = v;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}

template <typename T> struct Pair;
template <> struct Pair<float> { using type = float2; };
template <> struct Pair<__half> { using type = __half2; };
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };

template <typename T>
__device__ T silu(T v) { return v / (T(1.0f) + hexp(-v)); }
template <>
__device__ float silu<float>(float v) { return v / (1.0f + __expf(-v)); }

// block=32 right=np.repeat(x[:32]/(1+np.exp(-x[:32])),3)
extern "C" __global__ void silu_in_three_types(const float* x, float* out, int n) {
    const float v = x[threadIdx.x], s = silu(v);
    typename Pair<__half>::type h = {silu(__float2half(v)), silu(__float2half(v))};
    const float a = __low2float(h), b = __bfloat162float(silu(__float2bfloat16(v)));
    const bool near = fabsf(a - s) < 4e-3f && fabsf(b - s) < 4e-2f;
    for (int k = 0; k < 3; ++k) out[3 * threadIdx.x + k] = near ? s : -1.0f;
}

// block=32 right=[16,16]
extern "C" __global__ void atomic_halves(const float* x, float* out, int n) {
    __shared__ half2 total;
    __shared__ __nv_bfloat16 other;
    if (threadIdx.x == 0) total = make_half2(0, 0), other = __float2bfloat16(0.0f);
    __syncthreads();
    atomicAdd(&total, __float2half2_rn(0.5f));
    atomicAdd(&other, __float2bfloat16(0.5f));
    __syncthreads();
    if (threadIdx.x == 0) out[0] = __high2float(total), out[1] = __bfloat162float(other);
}

// block=64 right=[abs(x[:128].astype(np.float16)).max()]
extern "C" __global__ void half_absmax(const float* x, float* out, int n) {
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<32>(block);
    __shared__ half partial[2];
    half m = __hmax(__habs(__float2half(x[block.thread_rank()])), __habs(__float2half(x[64 + block.thread_rank()])));
    for (int i = tile.size() / 2; i > 0; i /= 2) m = __hmax(m, tile.shfl_down(m, i));
    if (tile.thread_rank() == 0) partial[tile.meta_group_rank()] = m;
    block.sync();
    if (block.thread_rank() == 0) out[0] = __hgt(partial[0], partial[1]) ? partial[0] : partial[1];
}

struct Complex {
    float re, im;
    __device__ Complex(float r = 0, float i = 0) : re(r), im(i) {}
    __device__ Complex operator*(const Complex& o) const { return {re * o.re - im * o.im, re * o.im + im * o.re}; }
    __device__ friend Complex operator+(Complex a, Complex b) { return Complex(a.re + b.re, a.im + b.im); }
    __device__ float norm() const { return hypotf(re, im); }
};

// block=32 right=np.abs((x[:32]+1j)**2+1)
extern "C" __global__ void structs(const float* x, float* out, int n) {
    Complex z(x[threadIdx.x], 1.f);
    out[threadIdx.x] = (z * z + Complex(1.f)).norm();
}

enum class Activation : int { relu, gelu, gelu_tanh, count };

template <Activation A>
__device__ float activate(float v) {
    if constexpr (A == Activation::relu) return v > 0 ? v : 0;
    else if constexpr (A == Activation::gelu) return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    else return 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
}

// block=100 right=0.5*x[:100]*(1+np.tanh(0.79788456*(x[:100]+0.044715*x[:100]**3)))
extern "C" __global__ void __launch_bounds__(128, 2) activations(const float* const __restrict__ x, float* out,
                                                                          const int n) {
    static_assert(static_cast<int>(Activation::count) == 3, "");
    const auto tid = threadIdx.x;
    const float v = x[tid], a = activate<Activation::gelu>(v), b = activate<Activation::gelu_tanh>(v);
    if (fabsf(a - b) > 1e-3f) printf("thread %d: %f and %f differ by %g\n", tid, a, b, a - b);
    out[tid] = b;
}

// block=64 shared=512 right=x[:64][::-1]+1
extern "C" __global__ void carved_shared(const float* x, float* out, int n) {
    extern __shared__ __align__(16) unsigned char smem[];
    float* values = reinterpret_cast<float*>(smem);
    half* ones = reinterpret_cast<half*>(values + 64);
    int* unused = (int*)(ones + 64);
    values[threadIdx.x] = x[threadIdx.x];
    ones[threadIdx.x] = __float2half(1.0f);
    if (threadIdx.x < 32) unused[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = values[63 - threadIdx.x] + __half2float(ones[63 - threadIdx.x]);
}

// block=32 right=np.arange(1,33)
extern "C" __global__ void math_of_cuda(const float* x, float* out, int n) {
    const float v = fabsf(x[threadIdx.x]) + 0.1f;
    float s, c, whole;
    sincosf(v, &s, &c);
    bool ok = fabsf(s * s + c * c - 1.0f) < 1e-5f;
    sincospif(v, &s, &c);
    ok = ok && fabsf(s * s + c * c - 1.0f) < 1e-5f;
    ok = ok && fabsf(exp10f(log10f(v)) - v) < 1e-4f;
    ok = ok && fabsf(rhypotf(3.0f, 4.0f) - 0.2f) < 1e-6f;
    ok = ok && fabsf(modff(2.25f, &whole) - 0.25f) < 1e-6f && fdimf(1, 2) == 0.0f && copysignf(v, -1.0f) < 0;
    ok = ok && fabsf(rnorm3df(1, 2, 2) - 1.0f / 3) < 1e-6f;
    ok = ok && lgammaf(3.0f) > 0.6f;
    ok = ok && ilogbf(8.0f) == 3 && scalbnf(1.0f, 3) == 8.0f && __float2int_rn(2.5f) == 2 && signbit(-v) &&
         norm4df(1, 1, 1, 1) == 2.0f;
    ok = ok && __isnanf(v - v) == 0 && llrintf(2.5f) == 2 && remainderf(5, 3) == -1.0f &&
         fabsf(cbrtf(8.0f) - 2) < 1e-6f;
    ok = ok && __hadd(3, 4) == 3 && __rhadd(3, 4) == 4 && __brevll(1ull) == 1ull << 63;
    out[threadIdx.x] = ok ? threadIdx.x + 1 : -1.0f;
}

// block=32 right=np.arange(1,33)
extern "C" __global__ void groups(const float* x, float* out, int n) {
    auto grid = cg::this_grid();
    auto block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    auto four = cg::tiled_partition<4>(warp);
    bool ok = grid.thread_rank() == threadIdx.x && grid.size() == 32 && block.group_index().x == 0;
    ok = ok && four.meta_group_size() == 8 && four.meta_group_rank() == threadIdx.x / 4;
    ok = ok && four.match_any(threadIdx.x / 2) == (threadIdx.x % 4 < 2 ? 3u : 12u);
    ok = ok && cg::reduce(four, 1, cg::plus<int>()) == 4;
    const int place = threadIdx.x + 1;
    ok = ok && block.dim_threads().x == 32 && warp.all(place > 0) && warp.ballot(place > 16) == 0xffff0000u;
    cg::sync(warp);
    out[grid.thread_rank()] = ok ? place : -1;
}

// block=32 right=(x[:32].astype(np.float16).astype(float)*2)
extern "C" __global__ void half_loads(const float* x, float* out, int n) {
    __shared__ __align__(16) half s[32];
    s[threadIdx.x] = __float2half_rn(x[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x < 4) {
        int4 raw = reinterpret_cast<const int4*>(s)[threadIdx.x];
        const half2* p = reinterpret_cast<const half2*>(&raw);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            half2 v = p[k] + p[k];
            out[8 * threadIdx.x + 2 * k] = v.x;
            out[8 * threadIdx.x + 2 * k + 1] = v.y;
        }
    }
}

// block=64 right=np.einsum('mk,nk->mn',*x[:512].astype(np.float16).astype(float).reshape(2,16,16))
extern "C" __global__ void product_of_tiles(const float* x, float* out, int n) {
    using namespace nvcuda::wmma;
    __shared__ __align__(32) half tiles[2][256];
    const int warp = threadIdx.x / warpSize;
    for (int i = threadIdx.x % 32; i < 256; i += 32) tiles[warp][i] = __float2half(x[256 * warp + i]);
    __syncthreads();
    if (warp > 0) return;
    fragment<matrix_a, 16, 16, 16, half, row_major> a;
    fragment<matrix_b, 16, 16, 16, half, col_major> b;
    fragment<accumulator, 16, 16, 16, float> sums;
    fill_fragment(sums, 0.0f);
    load_matrix_sync(a, tiles[0], 16);
    load_matrix_sync(b, tiles[1], 16);
    mma_sync(sums, a, b, sums);
    store_matrix_sync(out, sums, 16, mem_row_major);
}

// block=32 right=[np.sum(np.round(x[:128]*16).reshape(32,4)@np.arange(4))]
extern "C" __global__ void dot_of_bytes(const float* x, float* out, int n) {
    unsigned bytes = 0;
    for (int k = 0; k < 4; ++k) bytes |= (__float2int_rn(16.0f * x[4 * threadIdx.x + k]) & 0xffu) << 8 * k;
    const int sum = __dp4a((int)bytes, 0x03020100, 0);
    const int same = -__dp4a((int)__vneg4(bytes), 0x03020100, 0);
    const int all = __reduce_add_sync(0xffffffffu, sum == same ? sum : 1000000);
    if (threadIdx.x == 0) out[0] = all;
}

// block=32 right=np.ones(32)
extern "C" __global__ void interval(const float* x, float* out, int n) {  // that contains a quotient
    const float v = x[threadIdx.x], low = __fdiv_rd(v, 3.0f), high = __fdiv_ru(v, 3.0f);
    const bool inside = low <= v / 3.0f && v / 3.0f <= high && __fmaf_ru(high, 3.0f, -v) >= 0.0f;
    const bool near = low <= high && nextafterf(low, 1e30f) >= high && fabsf(erfinvf(erff(v)) - v) < 1e-2f;
    out[threadIdx.x] = inside && near && __fmaf_rd(low, 3.0f, -v) <= 0.0f ? 1.0f : 0.0f;
}

struct Largest {
    __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

template <typename Op, typename T, int WARPS>
__device__ T block_reduced(T value) {
    __shared__ struct {
        T parts[WARPS];
    } all[1];
    for (int n = 16; n > 0; n /= 2) value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, n));
    if (threadIdx.x % 32 == 0) all[0].parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = all[0].parts[0];
    for (int i = 1; i < WARPS; ++i) value = Op::of(value, all[0].parts[i]);
    __syncthreads();
    return value;
}

// grid=2 block=64 right=np.full(128,x[:64].max()+x[:64].min())
extern "C" __global__ void arrays_of_templates(const float* x, float* out, int n) {
    const float most = block_reduced<Largest, float, 2>(x[threadIdx.x]);
    const float least = -block_reduced<Largest, float, 2>(-x[threadIdx.x]);
    out[64 * blockIdx.x + threadIdx.x] = block_reduced<Largest, double, 2>(most + least);
}

// block=40 right=[max(x[32:40])]
extern "C" __global__ void maximum_of_a_partial_warp(const float* x, float* out, int n) {
    if (threadIdx.x < 32) return;
    float m = x[threadIdx.x];
    for (int i = 4; i; i /= 2) m = fmaxf(m, __shfl_down_sync(0xff, m, i));
    if (threadIdx.x == 32) out[0] = m;
}

// block=32 right=[x[7]]
extern "C" __global__ void a_segment_keeps_its_own_values(const float* x, float* out, int n) {
    if (threadIdx.x >= 8) return;
    const float v = __shfl_down_sync(0xff, x[threadIdx.x], 8, 8);
    if (threadIdx.x == 7) out[0] = v;
}

// block=32 right=np.cumsum(x)[39:71]
__device__ __noinline__ float sum_of_half(const float* x, int n) {
    if (n < 3) return n == 2 ? x[0] + x[1] : x[0];
    return sum_of_half(x, n / 2) + sum_of_half(x + n / 2, n - n / 2);
}
extern "C" __global__ void calls_itself(const float* x, float* out, int n) {
    out[threadIdx.x] = sum_of_half(x, 40 + threadIdx.x); }

// block=32 right=np.where(np.arange(32)%2,x[:32]/3,2*x[:32])
typedef float (*OfFloat)(float);
__device__ float twice(float v) { return 2 * v; }
__device__ float third(float v) { return v / 3; }
__device__ OfFloat table_of_functions[2] = {twice, third};
extern "C" __global__ void pointers_to_functions(const float* x, float* out, int n) {
    out[threadIdx.x] = table_of_functions[threadIdx.x % 2](x[threadIdx.x]); }

// block=32 right=x[8*np.arange(32)+np.arange(32)%8]
extern "C" __global__ void local_array(const float* x, float* out, int n) {
    float a[8];
    for (int i = 0; i < 8; ++i) a[i] = x[8 * threadIdx.x + i];
    out[threadIdx.x] = a[(threadIdx.x + n) % 8]; }

// grid=2 block=32 right=[2,2]
extern "C" __global__ void two_blocks_meet(const float* x, float* out, int n) {
    __shared__ int ticket;
    volatile int* flags = (volatile int*)(out + 10);
    if (threadIdx.x == 0) {
        flags[blockIdx.x] = 1;
        while (flags[1 - blockIdx.x] == 0) {}
        out[blockIdx.x] = 2.0f;
    }
}

// block=32 right=[1]
extern "C" __global__ void lane_waits_for_lane(const float* x, float* out, int n) {
    volatile int* flag = (volatile int*)(out + 10);
    if (threadIdx.x == 0) { while (*flag == 0) {} out[0] = 1.0f; }
    else if (threadIdx.x == 7) *flag = 1; }

// block=128 right=x[np.arange(128)^63]
extern "C" __global__ void named_barriers(const float* x, float* out, int n) {
    __shared__ float s[128]; const int pair = threadIdx.x / 64;
    s[threadIdx.x] = x[threadIdx.x];
    asm volatile("bar.sync %0, 64;" :: "r"(pair + 1) : "memory");
    out[threadIdx.x] = s[threadIdx.x ^ 63]; }

// block=64 right=x[31::-1]
extern "C" __global__ void producer_does_not_wait(const float* x, float* out, int n) {
    __shared__ float s[32];
    if (threadIdx.x < 32) { s[threadIdx.x] = x[threadIdx.x];
        asm volatile("bar.arrive 1, 64;" ::: "memory"); }
    else { asm volatile("bar.sync 1, 64;" ::: "memory");
        out[threadIdx.x - 32] = s[63 - threadIdx.x]; } }

// block=32 right=np.where(np.arange(32)%2,2,-1)*x[np.arange(32)^1]
extern "C" __global__ void shuffles_in_two_branches(const float* x, float* out, int n) {
    const float v = x[threadIdx.x]; float other;
    if (threadIdx.x % 2) {
        other = __shfl_xor_sync(~0u, v, 1); out[threadIdx.x] = other;
    } else { other = __shfl_xor_sync(~0u, 2 * v, 1); out[threadIdx.x] = -other; } }

// block=32 right=np.ones(32)
extern "C" __global__ void integers(const float* x, float* out, int n) {
    const int i = threadIdx.x - 16, d = i ? i : 1; const unsigned u = i * 77;
    const long long wide = (long long)i * i * 1000003;
    bool ok = i / d * d + i % d == i && __mulhi(i << 20, 1 << 20) == i * 256;
    ok = ok && wide / 1000003 == i * i && __popc(u) + __popc(~u) == 32;
    ok = ok && (u >> 5 << 5) + (u & 31) == u;
    ok = ok && __byte_perm(__byte_perm(u, 0, 0x0123), 0, 0x0123) == u;
    ok = ok && __brev(__brev(u)) == u;
    ok = ok && __funnelshift_l(u, u, 13) == (u << 13 | u >> 19);
    ok = ok && __sad(i, 3, 5u) == (unsigned)(abs(i - 3) + 5) && (short)i == i;
    out[threadIdx.x] = ok && (i >> 40 % 32 < 0) == (i < 0) ? 1.0f : 0.0f; }

// block=64 right=[40+63*32,63,0,40,(40+64)%42,(40-64)%51]
extern "C" __global__ void atomic_operations(const float* x, float* out, int n) {
    __shared__ unsigned s[6]; if (threadIdx.x < 6) s[threadIdx.x] = 40;
    __syncthreads(); const unsigned t = threadIdx.x;
    atomicAdd(s, t); atomicMax(s + 1, t); atomicMin(s + 2, t); atomicXor(s + 3, t);
    atomicInc(s + 4, 41); atomicOr((unsigned*)out + 20, 0u); atomicDec(s + 5, 50);
    __syncthreads(); if (t < 6) out[t] = s[t]; }
