// Functions of lib/sm80.cuh for GPUs of sm_75 (Turing), by the instructions that these GPUs have. They have no
// asynchronous copies, and tensor cores for float16 only.
#pragma once

constexpr bool HAS_BF16 = false;

// A copy whose 16 bytes are in registers from start() to end().
struct Copy16 {
    uint4 value;
    uint4* to = nullptr;

    __device__ __forceinline__ void start(void* shared, const void* global, bool there) {
        to = reinterpret_cast<uint4*>(shared);
        value = there ? *reinterpret_cast<const uint4*>(global) : uint4{};
    }
    __device__ __forceinline__ void end() {
        if (to) *to = value;
        to = nullptr;
    }
};

__device__ __forceinline__ void end_group() {}
template <int LATER>
__device__ __forceinline__ void wait_for_groups() {}

__device__ __forceinline__ unsigned pack2_fp16(float low, float high) {
    unsigned pair;
    asm("{\n.reg .f16 low, high;\ncvt.rn.f16.f32 low, %1;\ncvt.rn.f16.f32 high, %2;\nmov.b32 %0, {low, high};\n}"
        : "=r"(pair)
        : "f"(low), "f"(high));
    return pair;
}

// Returns the upper 16 bits of a float after rounding to bfloat16, the lower 16 bits in an undefined state.
__device__ __forceinline__ unsigned rounded_to_bf16(float value) {
    const unsigned bits = (unsigned)__float_as_int(value);
    return value == value ? bits + 0x7fffu + (bits >> 16 & 1) : 0x7fff0000u;
}

__device__ __forceinline__ unsigned pack2_bf16(float low, float high) {
    return __byte_perm(rounded_to_bf16(low), rounded_to_bf16(high), 0x7632);
}

// fmaf() rounds to float first. This changes no product (c is 0) and no sum (b is 1) of bfloat16 values, the only uses.
__device__ __forceinline__ unsigned fma2_bf16(unsigned a, unsigned b, unsigned c) {
    float of_a[2], of_b[2], of_c[2];
    unpack2_bf16(a, of_a), unpack2_bf16(b, of_b), unpack2_bf16(c, of_c);
    return pack2_bf16(fmaf(of_a[0], of_b[0], of_c[0]), fmaf(of_a[1], of_b[1], of_c[1]));
}

// Computes c += a b by two products with half of the K each.
__device__ __forceinline__ void mma_fp16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
    }
}

__device__ __forceinline__ unsigned bf16_to_fp16(unsigned pair);

// Computes c += a b for bfloat16 inputs, which are first rounded to float16.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const unsigned a16[4] = {bf16_to_fp16(a[0]), bf16_to_fp16(a[1]), bf16_to_fp16(a[2]), bf16_to_fp16(a[3])};
    const unsigned b16[2] = {bf16_to_fp16(b[0]), bf16_to_fp16(b[1])};
    mma_fp16(c, a16, b16);
}

// No kernel multiplies floats on tensor cores on these GPUs.
__device__ __forceinline__ void mma_tf32(float (&)[4], const unsigned (&)[4], const unsigned (&)[2]) { asm("trap;"); }
