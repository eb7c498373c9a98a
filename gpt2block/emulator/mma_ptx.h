// kernels_cu/lib/sm80.cuh for the CPU: the lanes of a warp exchange their registers. A copy to shared memory happens as
// late as the kernel may rely on, when its group is waited for, and the destination contains NaN until then; or
// immediately, if `run` requests it. Every other warp is delayed relative to the rest until a barrier. This reveals a
// missing wait or barrier, and a stage that is overwritten too early. Used through `headers` of a Source.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Copy16 {
    uint4* to;
    const uint4* from;  // null: zeros
};

constexpr int MOST_COPIES = 512;  // of a thread, in flight
static Copy16 copies_of[1024][MOST_COPIES];
static int asked[1024], groups_of[1024], group_ends[1024][64];

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

inline void meet() { cuda_on_cpu::exchange(0xffffffffu, 0, cuda_on_cpu::lane(), __FILE__, __LINE__); }

// A value of each lane of a warp, which all lanes give at the same time. A lane that has returned gives bytes of 0xFF.
template <typename V>
class OfWarp {
  public:
    explicit OfWarp(const V& own) {
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        count_ = ++counts_[thread];
        lanes_ = &given_[count_ % 2][thread / 32 * 32];
        given_[count_ % 2][thread] = {own, count_};
        meet();  // all lanes have then read the value before this one; the next one takes its memory
    }

    V operator[](int lane) const {
        const Given& given = lanes_[lane];
        V value;
        std::memset(&value, 0xFF, sizeof value);
        return given.count == count_ ? given.value : value;
    }

  private:
    struct Given {
        V value;
        unsigned count;  // of the lane's values so far
    };

    static inline Given given_[2][1024];
    static inline unsigned counts_[1024];

    unsigned count_;
    const Given* lanes_;
};

inline void lag() {
    for (int i = 0; i < 10 * (threadIdx.x / 32 % 2); ++i) meet();
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
    v[0] = __bfloat162float({(std::uint16_t)pair});
    v[1] = __bfloat162float({(std::uint16_t)(pair >> 16)});
}

inline void unpack2_fp16(unsigned pair, float (&v)[2]) {
    v[0] = __half2float({(std::uint16_t)pair});
    v[1] = __half2float({(std::uint16_t)(pair >> 16)});
}

inline void unpack2(unsigned pair, float (&v)[2]) { Vec<T, 2>{pair}.unpack(v); }

typedef void Unpack(unsigned, float (&)[2]);

struct Operands {
    unsigned a[4], b[2];
};

template <Unpack UNPACK>
void mma_of(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    const OfWarp<Operands> lanes({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    for (int l = 0; l < 4; ++l) {  // lanes with a part of K: one pair in a[0], a[1] and b[0], one in the others
        const Operands rows = lanes[4 * g + l], columns[2] = {lanes[8 * t + l], lanes[8 * t + 4 + l]};
        for (int i = 0; i < 2; ++i) {
            float upper[2], lower[2], left[2], right[2];
            UNPACK(rows.a[2 * i], upper);
            UNPACK(rows.a[2 * i + 1], lower);
            UNPACK(columns[0].b[i], left);
            UNPACK(columns[1].b[i], right);
            for (int e = 0; e < 2; ++e) {
                c[0] += upper[e] * left[e];
                c[1] += upper[e] * right[e];
                c[2] += lower[e] * left[e];
                c[3] += lower[e] * right[e];
            }
        }
    }
}

inline void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2>(c, a, b); }
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2_bf16>(c, a, b); }
inline void mma_fp16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_of<unpack2_fp16>(c, a, b); }

inline float tf32(unsigned bits) { return __int_as_float((int)(bits & 0xffffe000u)); }

inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    const OfWarp<Operands> lanes({{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    for (int i = 0; i < 2; ++i) {
        for (int l = 0; l < 4; ++l) {  // lanes with a part of K
            const Operands rows = lanes[4 * g + l];
            const float left = tf32(lanes[8 * t + l].b[i]), right = tf32(lanes[8 * t + 4 + l].b[i]);
            c[0] += tf32(rows.a[2 * i]) * left;
            c[1] += tf32(rows.a[2 * i]) * right;
            c[2] += tf32(rows.a[2 * i + 1]) * left;
            c[3] += tf32(rows.a[2 * i + 1]) * right;
        }
    }
}

inline unsigned pack2_bf16(float low, float high) {
    return __float2bfloat16_rn(low).bits | (unsigned)__float2bfloat16_rn(high).bits << 16;
}

inline unsigned pack2_fp16(float low, float high) {
    return __float2half_rn(low).bits | (unsigned)__float2half_rn(high).bits << 16;
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
