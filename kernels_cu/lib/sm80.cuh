// PTX instructions of the tensor-core kernels, each wrapped in a small function. lib/sm75.cuh has the functions whose
// instructions sm_75 lacks.
//
// A warp multiplies A (16, 16) and B (16, 8) into C (16, 8). Lane 4 g + t holds the following values, two 16-bit values
// per register of A and B:
//
//   a[0] = A[g    ][2t, 2t + 1]   a[2] = A[g    ][2t + 8, 2t + 9]     b[0] = B[2t,     2t + 1][g]
//   a[1] = A[g + 8][2t, 2t + 1]   a[3] = A[g + 8][2t + 8, 2t + 9]     b[1] = B[2t + 8, 2t + 9][g]
//   c[0], c[1] = C[g][2t, 2t + 1]   c[2], c[3] = C[g + 8][2t, 2t + 1]
//
// The 16 values along K may be in any order, provided that A and B use the same order.
#pragma once

__device__ __forceinline__ void unpack2_bf16(unsigned pair, float (&v)[2]) {
    v[0] = __int_as_float((int)(pair << 16)), v[1] = __int_as_float((int)(pair & 0xffff0000u));
}

__device__ __forceinline__ void unpack2_fp16(unsigned pair, float (&v)[2]) {
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(v[0]), "=f"(v[1])
        : "r"(pair));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#include "lib/sm75.cuh"
#else
constexpr bool HAS_BF16 = true;  // whether tensor cores multiply bfloat16, and copies are asynchronous

// A copy of 16 bytes from global to shared memory, bypassing the L1 cache. If `there` is false, it writes 16 zero bytes
// and reads nothing. The surrounding 128 bytes are prefetched into the L2 cache, because other threads and blocks need
// them next. After start(), end() and wait_for_groups() of its group, the copy has arrived.
struct Copy16 {
    __device__ __forceinline__ void start(void* shared, const void* global, bool there) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(__cvta_generic_to_global(global)), "r"(there ? 16 : 0)
                     : "memory");
    }
    __device__ __forceinline__ void end() {}
};

// Closes a group of copies: all copies that this thread has issued since its last call of end_group().
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of copies of this thread have arrived, except the LATER most recent groups.
template <int LATER>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// mma_bf16() and mma_fp16() compute c += a b for bfloat16 and float16 inputs.
#define DEFINE_MMA(NAME, TYPES)                                                                                \
    __device__ __forceinline__ void NAME(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {     \
        asm("mma.sync.aligned.m16n8k16.row.col." TYPES                                                        \
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                              \
    }
DEFINE_MMA(mma_bf16, "f32.bf16.bf16.f32")
DEFINE_MMA(mma_fp16, "f32.f16.f16.f32")
#undef DEFINE_MMA

// Computes c += a b for A (16, 8) and B (8, 8) of type tf32: floats whose low 13 bits are ignored. Lane 4 g + t holds
//
//   a[0] = A[g][t]   a[1] = A[g + 8][t]   a[2] = A[g][t + 4]   a[3] = A[g + 8][t + 4]
//   b[0] = B[t][g]   b[1] = B[t + 4][g]
__device__ __forceinline__ void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds two floats to bfloat16 or float16 and packs them into a register: `low` into its lower half, `high` into its
// upper half.
__device__ __forceinline__ unsigned pack2_bf16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned pack2_fp16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Computes a b + c for pairs of bfloat16 values; each result is rounded once.
__device__ __forceinline__ unsigned fma2_bf16(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
#endif

__device__ __forceinline__ void copy16(void* shared, const void* global, bool there) {
    Copy16 copy;
    copy.start(shared, global, there);
    copy.end();
}

template <int COUNT>
__device__ __forceinline__ void end_copies(Copy16 (&copies)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) copies[i].end();
}

// Rounds two bfloat16 values to float16. 0 and magnitudes from 2^-17 to 65504 do not change; larger ones become
// infinite.
__device__ __forceinline__ unsigned bf16_to_fp16(unsigned pair) {
    float v[2];
    unpack2_bf16(pair, v);
    return pack2_fp16(v[0], v[1]);
}

// Loads two or four 8x8 matrices of 16-bit values from shared memory. Lane 8 i + r (r = 0..7) passes the address of row
// r of matrix i, aligned to 16 bytes. Lane 4 g + t (t = 0..3) receives columns 2t and 2t + 1 of row g of each matrix,
// or if TRANSPOSED rows 2t and 2t + 1 of column g.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned& m0, unsigned& m1, const void* row) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(m0), "=r"(m1)
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(m0), "=r"(m1)
                     : "r"(address)
                     : "memory");
    }
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, const void* row) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                     : "r"(address)
                     : "memory");
    }
}

// mma(), pack2(), multiply2() and add2() process values of the type T of the activations.
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(STORAGE_BF16)
    mma_bf16(c, a, b);
#else
    mma_fp16(c, a, b);
#endif
}

__device__ __forceinline__ unsigned pack2(float low, float high) {
#if defined(STORAGE_BF16)
    return pack2_bf16(low, high);
#else
    return pack2_fp16(low, high);
#endif
}

// multiply2(), add2(), add2_fp16() and fma2_fp16() process pairs of 16-bit values; each result is rounded once. For
// bfloat16, fma replaces add and mul, which exist only from sm_90 on.
__device__ __forceinline__ unsigned multiply2(unsigned a, unsigned b) {
    unsigned product;
#if defined(STORAGE_BF16)
    product = fma2_bf16(a, b, 0x80008000u);  // a b + -0 is a b
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
    return product;
}

__device__ __forceinline__ unsigned add2_fp16(unsigned a, unsigned b) {
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ unsigned fma2_fp16(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Returns the lower 16 bits of b, or if UPPER the upper 16 bits, in both halves of the result. No extra instruction is
// needed if the result is an operand of add2_fp16() or fma2_fp16().
template <bool UPPER>
__device__ __forceinline__ unsigned twice(unsigned b) {
    unsigned both;
#define HALF_TWICE(half) "{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {" half ", " half "};\n}"
    if (UPPER) asm(HALF_TWICE("high") : "=r"(both) : "r"(b));
    else asm(HALF_TWICE("low") : "=r"(both) : "r"(b));
#undef HALF_TWICE
    return both;
}

__device__ __forceinline__ unsigned add2(unsigned a, unsigned b) {
#if defined(STORAGE_BF16)
    return fma2_bf16(a, 0x3f803f80u, b);  // a * 1 + b
#else
    return add2_fp16(a, b);
#endif
}

// Returns bytes LOW and HIGH of `bytes`, each as the upper byte of a 16-bit value.
template <int LOW, int HIGH>
__device__ __forceinline__ unsigned spread(unsigned bytes) {
    return __byte_perm(bytes, 0u, HIGH << 12 | 4 << 8 | LOW << 4 | 4);
}
