// Register tiles: the inner loop of learn/matmul/registers.cu and matmul/prompt/cores.cu. A thread computes SIDE x SPAN
// outputs of a product of floats; a warp computes (8 SIDE) x (4 SPAN) outputs. In a step along k, a thread reads SIDE
// values of the left matrix and SPAN of the right one from shared memory, mostly four at a time. k is the outer
// dimension in shared memory.
//
//   lane (ty, tx), ty = 0..7, tx = 0..3, has    rows 4 ty + 32 h + e (h < SIDE / 4, e = 0..3)
//                                               columns 4 tx + 16 g + e (g < SPAN / 4, e = 0..3)
//   if SIDE is 2 or 6, two more rows            32 h + 2 ty + e (h = SIDE / 4, e = 0, 1)
//   if SPAN is 2 or 6, two more columns         16 g + 2 tx + e (g = SPAN / 4, e = 0, 1)
#pragma once

#include "lib/copies.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int UNROLL = 2;  // unroll factor along k: a higher factor causes register spills
#else
constexpr int UNROLL = 16;
#endif

__device__ __forceinline__ void ld_four(float* to, const float* p) {
    const float4 v = ld_vec(p);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
}

// Copies 4, 2 or 1 values from global to shared memory, or stores zeros if `inside` is false. The values are available
// after wait_for_groups() of their group.
template <int VALUES>
__device__ __forceinline__ void copy(float* shared, const float* global, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = inside ? 4 * VALUES : 0;  // bytes to read; other bytes become zeros
    if (VALUES == 4) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    } else if (VALUES == 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
    }
#else
    if (VALUES == 4) {
        st_vec(shared, inside ? ld_vec(global) : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    } else if (VALUES == 2) {
        const float2 zero = {0.0f, 0.0f};
        *reinterpret_cast<float2*>(shared) = inside ? *reinterpret_cast<const float2*>(global) : zero;
    } else {
        *shared = inside ? *global : 0.0f;
    }
#endif
}

__device__ __forceinline__ void end_group_of_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of this thread's copies have arrived, except the LAST most recent groups.
template <int LAST>
__device__ __forceinline__ void wait_for_copies_but() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
#endif
}

// Adds the products of STEPS values of k. `a` and `b` point to the thread's first row and column. A_STRIDE and B_STRIDE
// are the distances in floats between successive k. a_rest and b_rest point to the two remaining values if SIDE or SPAN
// is not a multiple of 4.
template <int STEPS, int A_STRIDE, int B_STRIDE, int SIDE, int SPAN>
__device__ __forceinline__ void add_slice(float (&sum)[SIDE][SPAN], const float* a, const float* b,
                                          const float* a_rest = nullptr, const float* b_rest = nullptr) {
    static_assert(SIDE % 2 == 0 && SPAN % 2 == 0, "values come by four, and two in the end");
#pragma unroll UNROLL
    for (int k = 0; k < STEPS; ++k) {
        float row[SIDE], column[SPAN];
#pragma unroll
        for (int r = 0; r + 4 <= SIDE; r += 4) ld_four(row + r, a + k * A_STRIDE + 8 * r);
        if constexpr (SIDE % 4 != 0) {
            const float2 v = *reinterpret_cast<const float2*>(a_rest + k * A_STRIDE);
            row[SIDE - 2] = v.x;
            row[SIDE - 1] = v.y;
        }
#pragma unroll
        for (int c = 0; c + 4 <= SPAN; c += 4) ld_four(column + c, b + k * B_STRIDE + 4 * c);
        if constexpr (SPAN % 4 != 0) {
            const float2 v = *reinterpret_cast<const float2*>(b_rest + k * B_STRIDE);
            column[SPAN - 2] = v.x;
            column[SPAN - 1] = v.y;
        }
#pragma unroll
        for (int r = 0; r < SIDE; ++r) {
#pragma unroll
            for (int c = 0; c < SPAN; ++c) sum[r][c] += row[r] * column[c];
        }
    }
}
