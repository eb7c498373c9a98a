// Tensor-core products of a warpgroup (128 threads): C (64, N) += A (64, 16) B (16, N), 16-bit inputs, fp32 sums.
//
// A and B lie in shared memory in the layout in which TMA stores boxes of 64 columns: rows of 128 bytes,
// swizzled, aligned to 1024 bytes. A descriptor holds the address. B is stored as (N, K), one row per column of C, or
// with ACROSS as (K, N): boxes of 64 columns, one box after the other. A can also come from registers, in the layout of
// the sums C. Thread 32 w + 4 g + t (g = 0..7, t = 0..3) holds these values of C, for j = 0..N/8-1:
//
//   c[4 j], c[4 j + 1]       C[16 w + g    ][8 j + 2t, 8 j + 2t + 1]
//   c[4 j + 2], c[4 j + 3]   C[16 w + g + 8][8 j + 2t, 8 j + 2t + 1]
//
// Products are asynchronous. Call fence_sums() before the first product that uses the registers of the sums,
// end_products() to close a group of products, and wait_for_products<LATER>() to wait for all but the LATER most recent
// groups.
#pragma once

#include "lib/sm90.cuh"

#if defined(STORAGE_BF16)
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

typedef unsigned long long Matrix;  // descriptor of a matrix in shared memory

// Returns the wgmma descriptor of a matrix in shared memory. columns: with ACROSS, the distance in bytes from a box of
// B to the box of the next 64 columns.
__device__ __forceinline__ Matrix matrix_at(const void* shared, int columns = 16) {
    const unsigned swizzle_128 = 1u << 30, eight_rows = 1024 >> 4;  // bytes between groups of 8 rows, in units of 16
    unsigned place = shared_address(shared) >> 4;
    if (columns != 16) place &= 0x3fff;  // in a cluster, higher bits hold the block's rank and would change `columns`
    return (Matrix)(swizzle_128 | eight_rows) << 32 | ((unsigned)columns >> 4 << 16 | place);
}

// Returns the descriptor of the address `bytes` bytes later: 32 for the next 16 columns of 16-bit values, 2048 for the
// next 16 rows.
__device__ __forceinline__ Matrix further(Matrix matrix, int bytes) {
    unsigned low, high;  // two words: a 64-bit addition would also compute the carry into the high word
    asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "l"(matrix));
    asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low + (bytes >> 4)), "r"(high));
    return matrix;
}

__device__ __forceinline__ void fence_sums() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

// Keeps the compiler from moving uses of the registers `c` across this point.
template <int COUNT>
__device__ __forceinline__ void pin(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Lists of register operands of c in an asm statement, in groups of 8: placeholders (NAMES..) and constraints (SUMS..).
#define NAMES8(a, b, c, d, e, f, g, h) \
    "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define NAMES16 NAMES8(0, 1, 2, 3, 4, 5, 6, 7) ", " NAMES8(8, 9, 10, 11, 12, 13, 14, 15)
#define NAMES24 NAMES16 ", " NAMES8(16, 17, 18, 19, 20, 21, 22, 23)
#define NAMES32 NAMES24 ", " NAMES8(24, 25, 26, 27, 28, 29, 30, 31)
#define NAMES40 NAMES32 ", " NAMES8(32, 33, 34, 35, 36, 37, 38, 39)
#define NAMES48 NAMES40 ", " NAMES8(40, 41, 42, 43, 44, 45, 46, 47)
#define NAMES56 NAMES48 ", " NAMES8(48, 49, 50, 51, 52, 53, 54, 55)
#define NAMES64 NAMES56 ", " NAMES8(56, 57, 58, 59, 60, 61, 62, 63)
#define NAMES72 NAMES64 ", " NAMES8(64, 65, 66, 67, 68, 69, 70, 71)
#define NAMES80 NAMES72 ", " NAMES8(72, 73, 74, 75, 76, 77, 78, 79)
#define NAMES88 NAMES80 ", " NAMES8(80, 81, 82, 83, 84, 85, 86, 87)
#define NAMES96 NAMES88 ", " NAMES8(88, 89, 90, 91, 92, 93, 94, 95)
#define NAMES104 NAMES96 ", " NAMES8(96, 97, 98, 99, 100, 101, 102, 103)
#define NAMES112 NAMES104 ", " NAMES8(104, 105, 106, 107, 108, 109, 110, 111)
#define NAMES120 NAMES112 ", " NAMES8(112, 113, 114, 115, 116, 117, 118, 119)
#define NAMES128 NAMES120 ", " NAMES8(120, 121, 122, 123, 124, 125, 126, 127)

#define SUMS8(i)                                                                                             \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define SUMS16 SUMS8(0), SUMS8(8)
#define SUMS24 SUMS16, SUMS8(16)
#define SUMS32 SUMS24, SUMS8(24)
#define SUMS40 SUMS32, SUMS8(32)
#define SUMS48 SUMS40, SUMS8(40)
#define SUMS56 SUMS48, SUMS8(48)
#define SUMS64 SUMS56, SUMS8(56)
#define SUMS72 SUMS64, SUMS8(64)
#define SUMS80 SUMS72, SUMS8(72)
#define SUMS88 SUMS80, SUMS8(80)
#define SUMS96 SUMS88, SUMS8(88)
#define SUMS104 SUMS96, SUMS8(96)
#define SUMS112 SUMS104, SUMS8(104)
#define SUMS120 SUMS112, SUMS8(112)
#define SUMS128 SUMS120, SUMS8(120)

// multiply(c, a, b, adds) computes c += a b, or if `adds` is false c = a b. Each thread holds N / 2 sums. A, B, P and X
// are the operand numbers of a, b, `adds` and ACROSS. wgmma supports any multiple of 8 as N; the list has the values of
// N that some tile uses, and a few for experiments.
#define PRODUCT(N, COUNT, A, B, P, X)                                                                                \
    template <bool ACROSS = false>                                                                                   \
    __device__ __forceinline__ void multiply(float (&c)[COUNT], Matrix a, Matrix b, bool adds) {                     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES                                       \
                     " {" NAMES##COUNT "}, %" #A ", %" #B ", p, 1, 1, 0, %" #X ";\n}"                                \
                     : SUMS##COUNT                                                                                   \
                     : "l"(a), "l"(b), "r"((int)adds), "n"((int)ACROSS));                                            \
    }

PRODUCT(32, 16, 16, 17, 18, 19)
PRODUCT(48, 24, 24, 25, 26, 27)
PRODUCT(64, 32, 32, 33, 34, 35)
PRODUCT(80, 40, 40, 41, 42, 43)
PRODUCT(96, 48, 48, 49, 50, 51)
PRODUCT(112, 56, 56, 57, 58, 59)
PRODUCT(128, 64, 64, 65, 66, 67)
PRODUCT(144, 72, 72, 73, 74, 75)
PRODUCT(160, 80, 80, 81, 82, 83)
PRODUCT(176, 88, 88, 89, 90, 91)
PRODUCT(192, 96, 96, 97, 98, 99)
PRODUCT(224, 112, 112, 113, 114, 115)
PRODUCT(256, 128, 128, 129, 130, 131)

// multiply() with A in registers of thread 32 w + 4 g + t: a[0] = A[16 w + g][2t, 2t + 1], a[1] = A[16 w + g + 8][2t,
// 2t + 1]; a[2] and a[3] are the same rows at columns 2t + 8, 2t + 9. The registers must not change until the product
// is complete. A0 to A3: operand numbers of a[0] to a[3].
#define PRODUCT_OF_REGISTERS(N, COUNT, NAMES, SUMS, A0, A1, A2, A3, B, P, X)                                         \
    template <bool ACROSS = false>                                                                                   \
    __device__ __forceinline__ void multiply(float (&c)[COUNT], const unsigned (&a)[4], Matrix b, bool adds) {       \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" NAMES "}, {%" #A0 ", %" #A1      \
                     ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #X ";\n}"                                          \
                     : SUMS                                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"((int)ACROSS));        \
    }

// Placeholders and constraints of the register operands for 4 and 8 sums per thread.
#define FIRST4 "%0, %1, %2, %3"
#define FIRST8 NAMES8(0, 1, 2, 3, 4, 5, 6, 7)
#define SUMS4 "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])

PRODUCT_OF_REGISTERS(8, 4, FIRST4, SUMS4, 4, 5, 6, 7, 8, 9, 10)
PRODUCT_OF_REGISTERS(16, 8, FIRST8, SUMS8(0), 8, 9, 10, 11, 12, 13, 14)
PRODUCT_OF_REGISTERS(32, 16, NAMES16, SUMS16, 16, 17, 18, 19, 20, 21, 22)
PRODUCT_OF_REGISTERS(64, 32, NAMES32, SUMS32, 32, 33, 34, 35, 36, 37, 38)
PRODUCT_OF_REGISTERS(96, 48, NAMES48, SUMS48, 48, 49, 50, 51, 52, 53, 54)
PRODUCT_OF_REGISTERS(128, 64, NAMES64, SUMS64, 64, 65, 66, 67, 68, 69, 70)
PRODUCT_OF_REGISTERS(160, 80, NAMES80, SUMS80, 80, 81, 82, 83, 84, 85, 86)
PRODUCT_OF_REGISTERS(192, 96, NAMES96, SUMS96, 96, 97, 98, 99, 100, 101, 102)
PRODUCT_OF_REGISTERS(256, 128, NAMES128, SUMS128, 128, 129, 130, 131, 132, 133, 134)
