// Replacement of kernels_cu/lib/sm80.cuh without PTX: the lanes of a warp exchange their registers. A copy to shared
// memory happens as late as its semantics allow, when the kernel waits for its group, and the destination contains NaN
// until then; with copies_at_once, it happens immediately. Every second warp is delayed relative to the others until a
// barrier. This reveals a missing wait or barrier, and a stage that is overwritten too early. The loader substitutes
// this file (STAND_INS).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <of_warp.h>

struct Copy16 {
    uint4* to;
    const uint4* from;  // source; null: write zeros
};

constexpr int MOST_COPIES = 512;  // maximum number of copies in flight per thread
static Copy16 copies_of[1024][MOST_COPIES];
static int asked[1024], groups_of[1024], group_ends[1024][64];
static const bool forgotten = cuda_on_cpu::each_block_first([] {  // drop copies that the previous block did not await
    for (int thread = 0; thread < 1024; ++thread) asked[thread] = groups_of[thread] = 0;
});

inline void arrive(const Copy16& copy) { *copy.to = copy.from ? *copy.from : uint4{}; }

inline void copy16(void* shared, const void* global, bool there) {
    const Copy16 copy = {static_cast<uint4*>(shared), there ? static_cast<const uint4*>(global) : nullptr};
    if (cuda_on_cpu::copies_at_once()) return arrive(copy);
    if (asked[threadIdx.x] == MOST_COPIES) __builtin_trap();
    copies_of[threadIdx.x][asked[threadIdx.x]++] = copy;
    *copy.to = {~0u, ~0u, ~0u, ~0u};
}

inline void end_group() {
    const int thread = threadIdx.x;
    group_ends[thread][groups_of[thread]++] = asked[thread];
}

template <int LATER>
void wait_for_groups() {
    const int thread = threadIdx.x, arrived = groups_of[thread] - LATER;
    if (arrived <= 0) return;
    const int copies = group_ends[thread][arrived - 1];
    for (int i = 0; i < copies; ++i) arrive(copies_of[thread][i]);
    for (int i = copies; i < asked[thread]; ++i) copies_of[thread][i - copies] = copies_of[thread][i];
    for (int i = arrived; i < groups_of[thread]; ++i) group_ends[thread][i - arrived] = group_ends[thread][i] - copies;
    asked[thread] -= copies;
    groups_of[thread] -= arrived;
}

inline void lag() {
    if (threadIdx.x / 32 % 2) cuda_on_cpu::gather(0xffffffffu, 0, __FILE__, __LINE__, 10);
}

template <bool TRANSPOSED>
unsigned matrix(int i, const OfWarp<const void*>& rows) {
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    if (!TRANSPOSED) return static_cast<const unsigned*>(rows[8 * i + g])[t];
    const unsigned first = static_cast<const unsigned short*>(rows[8 * i + 2 * t])[g];
    return first | (unsigned)static_cast<const unsigned short*>(rows[8 * i + 2 * t + 1])[g] << 16;
}

template <bool TRANSPOSED>
void load_matrices(unsigned& m0, unsigned& m1, const void* row) {
    lag();
    const OfWarp<const void*> rows(row);
    m0 = matrix<TRANSPOSED>(0, rows);
    m1 = matrix<TRANSPOSED>(1, rows);
}

template <bool TRANSPOSED>
void load_matrices(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, const void* row) {
    lag();
    const OfWarp<const void*> rows(row);
    m0 = matrix<TRANSPOSED>(0, rows);
    m1 = matrix<TRANSPOSED>(1, rows);
    m2 = matrix<TRANSPOSED>(2, rows);
    m3 = matrix<TRANSPOSED>(3, rows);
}

inline void unpack2_bf16(unsigned pair, float (&v)[2]) {
    v[0] = cuda_on_cpu::bf16_value((std::uint16_t)pair);
    v[1] = cuda_on_cpu::bf16_value((std::uint16_t)(pair >> 16));
}

inline void unpack2_fp16(unsigned pair, float (&v)[2]) {
    v[0] = cuda_on_cpu::fp16_value((std::uint16_t)pair);
    v[1] = cuda_on_cpu::fp16_value((std::uint16_t)(pair >> 16));
}

inline void unpack2(unsigned pair, float (&v)[2]) { Vec<T, 2>{pair}.unpack(v); }

typedef void Unpack(unsigned, float (&)[2]);

template <int N>
struct Operands {  // a lane's operands of an mma, with N numbers in each register
    float a[4][N], b[2][N];
};

// Not inlined, so that the function is compiled once rather than for every call.
template <int N>
__attribute__((noinline)) UNCHECKED void multiply_add(float (&c)[4], const Operands<N>& own) {
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    const OfWarp<Operands<N>> lanes(own);
    for (int n = 0; n < 8; ++n) {  // part n of K: index i of the registers, and lane l of the group that holds the part
        const int i = N == 2 ? n % 2 : n / 4, l = N == 2 ? n / 2 : n % 4;
        const Operands<N>&rows = lanes[4 * g + l], &left = lanes[8 * t + l], &right = lanes[8 * t + 4 + l];
        for (int e = 0; e < N; ++e) {
            c[0] += rows.a[2 * i][e] * left.b[i][e];
            c[1] += rows.a[2 * i][e] * right.b[i][e];
            c[2] += rows.a[2 * i + 1][e] * left.b[i][e];
            c[3] += rows.a[2 * i + 1][e] * right.b[i][e];
        }
    }
}

template <Unpack UNPACK>
__attribute__((noinline)) void mma_of(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    Operands<2> own;
    for (int i = 0; i < 4; ++i) UNPACK(a[i], own.a[i]);
    for (int i = 0; i < 2; ++i) UNPACK(b[i], own.b[i]);
    multiply_add(c, own);
}

inline void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2>(c, a, b); }
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2_bf16>(c, a, b); }
inline void mma_fp16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2_fp16>(c, a, b); }

inline float tf32(unsigned bits) { return __int_as_float((int)(bits & 0xffffe000u)); }

inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    Operands<1> own;
    for (int i = 0; i < 4; ++i) own.a[i][0] = tf32(a[i]);
    for (int i = 0; i < 2; ++i) own.b[i][0] = tf32(b[i]);
    multiply_add(c, own);
}

inline unsigned pack2_bf16(float low, float high) {
    return cuda_on_cpu::bf16_bits(low) | (unsigned)cuda_on_cpu::bf16_bits(high) << 16;
}

inline unsigned pack2_fp16(float low, float high) {
    return cuda_on_cpu::fp16_bits(low) | (unsigned)cuda_on_cpu::fp16_bits(high) << 16;
}

inline unsigned pack2(float low, float high) {
    const T pair[2] = {narrow(low), narrow(high)};
    unsigned bits;
    std::memcpy(&bits, pair, 4);
    return bits;
}

inline unsigned multiply2(unsigned a, unsigned b) {
    float v[2], w[2];
    unpack2(a, v);
    unpack2(b, w);
    return pack2(v[0] * w[0], v[1] * w[1]);
}

inline unsigned add2_fp16(unsigned a, unsigned b) {
    float v[2], w[2];
    unpack2_fp16(a, v);
    unpack2_fp16(b, w);
    return pack2_fp16(v[0] + w[0], v[1] + w[1]);
}

// Rounds correctly only if a float holds the products exactly, as is the case in all kernels of kernels_cu.
inline unsigned fma2_fp16(unsigned a, unsigned b, unsigned c) {
    float v[2], w[2], more[2];
    unpack2_fp16(a, v);
    unpack2_fp16(b, w);
    unpack2_fp16(c, more);
    return pack2_fp16(v[0] * w[0] + more[0], v[1] * w[1] + more[1]);
}

template <bool UPPER>
unsigned twice(unsigned b) {
    return (UPPER ? b >> 16 : b & 0xffffu) * 0x10001u;
}

inline unsigned add2(unsigned a, unsigned b) {
    float v[2], w[2];
    unpack2(a, v);
    unpack2(b, w);
    return pack2(v[0] + w[0], v[1] + w[1]);
}

template <int LOW, int HIGH>
unsigned spread(unsigned bytes) {
    return (bytes >> 8 * LOW & 0xffu) << 8 | (bytes >> 8 * HIGH & 0xffu) << 24;
}
