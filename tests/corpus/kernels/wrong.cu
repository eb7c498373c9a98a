// Kernels with one mistake each. The line above a kernel: launch settings, then a pattern of what must be said, or
// "result" where a wrong result is what shows it. `right` is the NumPy expression of the result.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <mma.h>

// block=64 | race .* (changed|read|wrote) .*
extern "C" __global__ void atomic_then_plain(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    out[threadIdx.x] = count - 1;
}

// block=64 | race .* atomically changes out\[0\]
extern "C" __global__ void plain_after_atomic_in_global(const float* x, float* out, int n) {
    atomicAdd(&out[0], x[threadIdx.x]);
    if (threadIdx.x == 1) out[0] = 0.0f;
}

// block=64 | race .* reads total .* atomically changed
extern "C" __global__ void plain_read_by_other_threads(const float* x, float* out, int n) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&total, 1);
    } else {
        out[threadIdx.x] = total;
    }
}

// block=64 right=[64] | result
extern "C" __global__ void comparison_that_is_not_repeated(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int old = count;
    atomicCAS(&count, old, old + 1);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count;
}

// block=64 | race .* reads count .* atomically changed it
extern "C" __global__ void comparison_with_another_value(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const int old = count;
    atomicCAS(&count, old + 1, old);
}

// block=64 | race .* writes count .* read it
extern "C" __global__ void plain_write_beside_a_comparison(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x == 63) {
        count = 5;
    } else {
        int old = count, assumed;
        do {
            assumed = old;
            old = atomicCAS(&count, assumed, assumed + 1);
        } while (old != assumed);
    }
}

// grid=2 block=32 | race .* out\[0\] .* of another block
extern "C" __global__ void comparison_after_a_barrier(const float* x, float* out, int n) {
    __shared__ float old;
    if (threadIdx.x == 0) old = out[0];
    __syncthreads();
    if (threadIdx.x == 0) atomicCAS((int*)out, __float_as_int(old), __float_as_int(old + 1.0f));
}

// block=64 | race .* count
extern "C" __global__ void initialised_without_barrier(const float* x, float* out, int n) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    atomicAdd(&count, 1);
    __syncthreads();
    out[threadIdx.x] = count;
}

// grid=2 block=32 | race .* of another block
extern "C" __global__ void last_block_without_fence(const float* x, float* out, int n) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        out[1 + blockIdx.x] = x[blockIdx.x];
        last = atomicAdd((int*)&out[100], 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) out[0] = out[1] + out[2];
}

// block=64 | race .* data
extern "C" __global__ void flag_without_fence(const float* x, float* out, int n) {
    __shared__ volatile int flag;
    __shared__ float data;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) data = x[0], flag = 1;
    if (threadIdx.x == 32) {
        while (!flag) {}
        out[0] = data;
    }
}

// block=32 right=x[:32] | result
extern "C" __global__ void uninitialised_sum(const float* x, float* out, int n) {
    float sum;
    for (int i = 0; i < 1; ++i) sum += x[threadIdx.x];
    out[threadIdx.x] = sum;
}

// block=32 right=x[:32] | result
extern "C" __global__ void uninitialised_maximum(const float* x, float* out, int n) {
    float largest;
    for (int i = 0; i < n / n; ++i) largest = fmaxf(largest, x[threadIdx.x]);
    out[threadIdx.x] = largest;
}

// block=32 right=np.maximum(x[:32],x[1:33]) | result
extern "C" __global__ void unwritten_shared_maximum(const float* x, float* out, int n) {
    __shared__ float s[33];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = fmaxf(s[threadIdx.x], s[threadIdx.x + 1]);
}

// block=32 | READ out of bounds: byte .* of x
extern "C" __global__ void discarded_read(const float* x, float* out, int n) {
    float value = x[n + threadIdx.x];
    if (threadIdx.x < 0) out[0] = value;
    out[threadIdx.x] = 1.0f;
}

// block=32 | divergent barrier .*two barriers in one line
extern "C" __global__ void both_branches(const float* x, float* out, int n) {
    if (threadIdx.x % 2) __syncthreads(); else __syncthreads();
    out[threadIdx.x] = 1.0f;
}

// block=32 | divergent barrier .*the mask names the lane
extern "C" __global__ void ballot_of_half(const float* x, float* out, int n) {
    out[threadIdx.x] = 1.0f;
    if (threadIdx.x < 16) out[threadIdx.x] = __ballot_sync(0xffffffffu, x[threadIdx.x] > 0.0f);
}

// block=32 | divergent barrier .*the mask names the lane
extern "C" __global__ void shuffle_after_return(const float* x, float* out, int n) {
    if (threadIdx.x >= 20) return;
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 1);
}

// block=32 right=[max(x[:8])] | result
extern "C" __global__ void maximum_with_lanes_outside_the_mask(const float* x, float* out, int n) {
    if (threadIdx.x >= 8) return;
    float m = x[threadIdx.x];
    for (int i = 8; i; i /= 2) m = fmaxf(m, __shfl_down_sync(0xff, m, i));
    if (threadIdx.x == 0) out[0] = m;
}

// block=32 | divergent barrier .*the mask names the lane
extern "C" __global__ void warp_barrier_of_half(const float* x, float* out, int n) {
    if (threadIdx.x < 16) __syncwarp();
    out[threadIdx.x] = 1.0f;
}

// block=32 | race .* a local variable of thread \(0, 0, 0\)
extern "C" __global__ void pointer_to_local(const float* x, float* out, int n) {
    __shared__ float* shared_pointer;
    float own = x[threadIdx.x];
    if (threadIdx.x == 0) shared_pointer = &own;
    __syncthreads();
    out[threadIdx.x] = *shared_pointer;
}

// block=64 | race .* a\[\d\]\[\d+\]
extern "C" __global__ void two_dimensions(const float* x, float* out, int n) {
    __shared__ float a[2][33];
    a[threadIdx.x / 32][threadIdx.x % 32] = x[threadIdx.x];
    out[threadIdx.x] = a[1 - threadIdx.x / 32][threadIdx.x % 32];
}

// block=64 | race .* pairs\[\d+\]\.second
extern "C" __global__ void member(const float* x, float* out, int n) {
    struct Pair { float first, second; };
    __shared__ Pair pairs[64];
    pairs[threadIdx.x].second = x[threadIdx.x];
    out[threadIdx.x] = pairs[63 - threadIdx.x].second;
}

// block=64 shared=256 | race .* s\[\d+\]
extern "C" __global__ void dynamic_array(const float* x, float* out, int n) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = s[63 - threadIdx.x];
}

// grid=2 block=32 | race .* total
__device__ float total;
extern "C" __global__ void device_variable(const float* x, float* out, int n) {
    if (threadIdx.x == 0) total += x[blockIdx.x];
    out[threadIdx.x] = 1.0f;
}

// block=64 | race .* s\[\d+\]
extern "C" __global__ void missing_barrier_in_tree(const float* x, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int step = 32; step > 0; step /= 2) {
        if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
    }
    if (threadIdx.x == 0) out[0] = s[0];
}

// grid=5 block=256 | READ out of bounds: byte 4000 of x
extern "C" __global__ void missing_bound(const float* x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 2.0f * x[i];
}

// block=64 right=np.cumsum(x[:64]) | result|race
extern "C" __global__ void scan_with_one_buffer(const float* x, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int step = 1; step < 64; step *= 2) {
        if (threadIdx.x >= step) s[threadIdx.x] += s[threadIdx.x - step];
        __syncthreads();
    }
    out[threadIdx.x] = s[threadIdx.x];
}

// block=64 right=[x[:64].sum()] | result|race
extern "C" __global__ void old_warp_reduction(const float* x, float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    volatile float* v = s;
    if (threadIdx.x < 32) {
        v[threadIdx.x] += v[threadIdx.x + 32];
        v[threadIdx.x] += v[threadIdx.x + 16];
        v[threadIdx.x] += v[threadIdx.x + 8];
        v[threadIdx.x] += v[threadIdx.x + 4];
        v[threadIdx.x] += v[threadIdx.x + 2];
        v[threadIdx.x] += v[threadIdx.x + 1];
    }
    if (threadIdx.x == 0) out[0] = s[0];
}

// block=64 | race .* s\[\d+\] at
extern "C" __global__ void half_tree_without_barrier(const float* x, float* out, int n) {
    __shared__ half s[64];
    s[threadIdx.x] = __float2half(x[threadIdx.x]);
    for (int step = 32; step > 0; step /= 2) {
        if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = s[0];
}

// block=500 right=[10000.0] | result
extern "C" __global__ void half_overflow(const float* x, float* out, int n) {
    if (threadIdx.x == 0) {
        half sum = 0;
        for (int i = 0; i < n; ++i) sum += __float2half(10.0f);
        out[0] = __half2float(sum);
    }
}

// block=32 right=x[:64] | misaligned
extern "C" __global__ void misaligned_half2(const float* x, float* out, int n) {
    __shared__ half s[66];
    s[2 * threadIdx.x] = x[2 * threadIdx.x], s[2 * threadIdx.x + 1] = x[2 * threadIdx.x + 1];
    __syncthreads();
    const half2 v = *reinterpret_cast<half2*>(s + 1 + threadIdx.x / 2);
    out[threadIdx.x] = v.x;
}

// grid=4,4 block=16,16 | READ out of bounds
extern "C" __global__ void two_d_rows_and_columns_swapped(const float* x, float* out, int n) {
    const int col = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
    if (col < 20 && row < 50) out[row * 20 + col] = x[col * 50 + row + 20];
}

// block=64 | divergent barrier
extern "C" __global__ void tile_sync_by_half_of_it(const float* x, float* out, int n) {
    auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
    if (tile.thread_rank() < 16) tile.sync();
    out[threadIdx.x] = 1.0f;
}

// block=32 | race .* out\[\d+\]
extern "C" __global__ void half2_stores_overlap(const float* x, float* out, int n) {
    half2* h = reinterpret_cast<half2*>(out);
    h[threadIdx.x / 2] = __float2half2_rn(x[threadIdx.x]);
}

// block=32 | race .* count
extern "C" __global__ void plus_equal_is_not_atomic(const float* x, float* out, int n) {
    static __shared__ half count;
    if (threadIdx.x == 0) count = 0.0f;
    __syncthreads();
    count += half(1.0f);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count;
}

// block=128 | race .* s\[\d+\]\.x at
extern "C" __global__ void two_warps_share_a_row(const float* x, float* out, int n) {
    __shared__ __half2 s[32];
    s[threadIdx.x % 32] = __float2half2_rn(x[threadIdx.x]);
    __syncthreads();
    out[threadIdx.x] = __low2float(s[threadIdx.x % 32]);
}

// block=32 | race .* sums\[\d+\] at .* read it
extern "C" __global__ void tile_that_is_read_at_once(const float* x, float* out, int n) {
    __shared__ __align__(32) float sums[256];
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> tile;
    nvcuda::wmma::fill_fragment(tile, x[0]);
    nvcuda::wmma::store_matrix_sync(sums, tile, 16, nvcuda::wmma::mem_row_major);
    out[threadIdx.x] = sums[255 - threadIdx.x];
}

// block=32 | divergent barrier
extern "C" __global__ void tile_of_half_a_warp(const float* x, float* out, int n) {
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> tile;
    nvcuda::wmma::fill_fragment(tile, x[0]);
    if (threadIdx.x < 16) nvcuda::wmma::store_matrix_sync(out, tile, 16, nvcuda::wmma::mem_row_major);
}

// block=32 right=np.round(x[:128]*16).reshape(32,4)@np.arange(4) | result
extern "C" __global__ void signed_bytes_as_unsigned_ones(const float* x, float* out, int n) {
    unsigned bytes = 0;
    for (int k = 0; k < 4; ++k) bytes |= (__float2int_rn(16.0f * x[4 * threadIdx.x + k]) & 0xffu) << 8 * k;
    out[threadIdx.x] = __dp4a(bytes, 0x03020100u, 0u);
}

template <int WARPS>
__device__ float block_sum(float value) {  // without a barrier before the next call
    __shared__ float parts[WARPS];
    for (int n = 16; n > 0; n /= 2) value += __shfl_down_sync(0xffffffffu, value, n);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < WARPS; ++i) value += parts[i];
    return value;
}

// block=64 | race .* (writes|reads) parts\[[01]\]
extern "C" __global__ void template_without_its_last_barrier(const float* x, float* out, int n) {
    const float mean = block_sum<2>(x[threadIdx.x]) / 64;
    out[threadIdx.x] = block_sum<2>(x[threadIdx.x] * x[threadIdx.x]) - mean;
}

template <typename T>
struct Histogram {
    __device__ T* counts() {
        __shared__ union {
            T bins[2][8];
            int words[16];
        } all;
        return all.bins[0];
    }
};

// block=16 right=[16] | result|integer overflow
extern "C" __global__ void bins_that_begin_with_anything(const float* x, float* out, int n) {
    int* counts = Histogram<int>().counts();
    atomicAdd(&counts[threadIdx.x % 8], 1);
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < 8; ++i) counts[0] += counts[i];
    out[0] = counts[0];
}

// block=17 | global-buffer-overflow
extern "C" __global__ void one_thread_too_many(const float* x, float* out, int n) {
    float* bins = Histogram<float>().counts();
    bins[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = bins[threadIdx.x];
}
