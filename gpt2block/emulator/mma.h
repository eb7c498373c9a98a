// nvcuda::wmma: matrix products of a warp, of half, bfloat16 and TF32. Sums are computed in float. The mapping of a
// fragment's elements to lanes, which CUDA leaves unspecified, differs from a GPU's.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <of_warp.h>

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

namespace precision {
struct tf32;
}

template <typename T>
struct helper_traits {
    typedef T storage_element_type;
};
template <>
struct helper_traits<precision::tf32> {
    typedef float storage_element_type;
};

}  // namespace wmma
}  // namespace nvcuda

namespace wmma_on_cpu {

using namespace nvcuda::wmma;

template <typename T>
constexpr bool is_half = std::is_same_v<T, __half>;
template <typename T>
constexpr bool is_tf32 = std::is_same_v<T, precision::tf32>;


template <typename T>
constexpr bool is_operand = is_half<T> || is_tf32<T> || std::is_same_v<T, __nv_bfloat16>;
template <typename T>
constexpr bool is_sum = is_half<T> || std::is_same_v<T, float>;

constexpr bool is_shape(int m, int n, int k) {
    return k == 16 && ((m == 16 && n == 16) || (m == 32 && n == 8) || (m == 8 && n == 32));
}
constexpr bool is_shape_of_tf32(int m, int n, int k) { return m == 16 && n == 16 && k == 8; }

inline float number(__half h) { return cuda_on_cpu::fp16_value(h.bits); }
inline float number(__nv_bfloat16 b) { return cuda_on_cpu::bf16_value(b.bits); }
inline float number(float f) { return f; }

template <typename T, typename V>
float operand(V value) {
    return is_tf32<T> ? __uint_as_float(__float_as_uint(number(value)) & 0xffffe000u) : number(value);
}

// Synchronizes the lanes before one of them accesses the matrix, and checks its alignment.
template <typename T>
void arrive(const T* matrix, unsigned stride, const char* file, int line) {
    cuda_on_cpu::gather(0xffffffffu, 0, file, line);
    if (stride * sizeof(T) % 16) cuda_on_cpu::stop("wmma: the row stride is not a multiple of 16 bytes", file, line);
    if (reinterpret_cast<std::uintptr_t>(matrix) % 16) {
        cuda_on_cpu::stop("wmma: the address of the matrix is not a multiple of 16 bytes", file, line);
    }
}

// Returns the offset in memory of an element of this lane.
template <typename F>
std::size_t place(int element, unsigned stride, bool by_rows) {
    const int at = (32 * element + cuda_on_cpu::lane()) % (F::ROWS * F::COLUMNS);
    const std::size_t row = at / F::COLUMNS, column = at % F::COLUMNS;
    return by_rows ? row * stride + column : column * stride + row;
}

template <typename A, typename B>
struct Operands {
    float a[A::num_elements], b[B::num_elements];
};

template <typename A, typename B>
__attribute__((noinline)) UNCHECKED void multiply_add(float (&sums)[8], const Operands<A, B>& own, const char* file,
                                                      int line) {
    const OfWarp<Operands<A, B>> lanes(own, file, line);
    for (int i = 0; i < 8; ++i) {
        const int at = 32 * i + cuda_on_cpu::lane(), row = at / B::COLUMNS, column = at % B::COLUMNS;
        for (int k = 0; k < A::COLUMNS; ++k) {
            const int left = row * A::COLUMNS + k, right = k * B::COLUMNS + column;
            sums[i] += lanes[left % 32].a[left / 32] * lanes[right % 32].b[right / 32];
        }
    }
}

}  // namespace wmma_on_cpu

namespace nvcuda {
namespace wmma {

// A fragment of a matrix of ROWS x COLUMNS. Element i of a lane is element 32 i + lane of the matrix. For half
// operands, a lane always has 16 elements, and element numbers wrap around at the end of the matrix.
template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct alignas(8) fragment {
    static constexpr bool SUM = std::is_same_v<Use, accumulator>, TF32 = wmma_on_cpu::is_tf32<T>;
    static constexpr int ROWS = std::is_same_v<Use, matrix_b> ? k : m, COLUMNS = std::is_same_v<Use, matrix_a> ? k : n;
    static_assert(SUM ? wmma_on_cpu::is_sum<T> : wmma_on_cpu::is_operand<T>, "the emulator has no such type");
    static_assert(wmma_on_cpu::is_shape(m, n, k) ? !TF32 : wmma_on_cpu::is_shape_of_tf32(m, n, k) && (SUM || TF32),
                  "the emulator has no such shape");
    static_assert(SUM == std::is_void_v<Layout>, "operands alone have a layout");

    enum { num_elements = !SUM && wmma_on_cpu::is_half<T> ? 16 : ROWS * COLUMNS / 32 };
    enum { num_storage_elements = num_elements };
    typedef T element_type;
    typedef typename helper_traits<T>::storage_element_type storage_element_type;
    storage_element_type x[num_elements];
};

inline float __float_to_tf32(float v) {
    return std::isfinite(v) ? __uint_as_float((__float_as_uint(v) + 0x1000u) & 0xffffe000u) : v;
}

template <typename Use, int m, int n, int k, typename T, typename Layout>
__forceinline__ void fill_fragment(fragment<Use, m, n, k, T, Layout>& f,
                                   const typename helper_traits<T>::storage_element_type& value) {
    for (int i = 0; i < f.num_elements; ++i) f.x[i] = value;
}

template <typename Use, int m, int n, int k, typename T, typename Layout>
__forceinline__ void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f,
                                      const typename helper_traits<T>::storage_element_type* matrix, unsigned stride,
                                      CALL_SITE) {
    typedef fragment<Use, m, n, k, T, Layout> F;
    static_assert(!F::SUM, "the last argument for an accumulator is a layout");
    constexpr bool by_rows = std::is_same_v<Layout, row_major>;
    wmma_on_cpu::arrive(matrix, stride, file, line);
    for (int i = 0; i < f.num_elements; ++i) f.x[i] = matrix[wmma_on_cpu::place<F>(i, stride, by_rows)];
}

template <int m, int n, int k, typename T>
__forceinline__ void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const std::common_type_t<T>* matrix,
                                      unsigned stride, layout_t layout, CALL_SITE) {
    typedef fragment<accumulator, m, n, k, T> F;
    const bool by_rows = layout == mem_row_major;
    wmma_on_cpu::arrive(matrix, stride, file, line);
    for (int i = 0; i < f.num_elements; ++i) f.x[i] = matrix[wmma_on_cpu::place<F>(i, stride, by_rows)];
}

template <int m, int n, int k, typename T>
__forceinline__ void store_matrix_sync(std::common_type_t<T>* matrix, const fragment<accumulator, m, n, k, T>& f,
                                       unsigned stride, layout_t layout, CALL_SITE) {
    typedef fragment<accumulator, m, n, k, T> F;
    const bool by_rows = layout == mem_row_major;
    wmma_on_cpu::arrive(matrix, stride, file, line);
    for (int i = 0; i < f.num_elements; ++i) matrix[wmma_on_cpu::place<F>(i, stride, by_rows)] = f.x[i];
}

template <int m, int n, int k, typename T, typename Left, typename Right, typename D, typename C>
void mma_sync(fragment<accumulator, m, n, k, D>& d, const fragment<matrix_a, m, n, k, T, Left>& a,
              const fragment<matrix_b, m, n, k, T, Right>& b, const fragment<accumulator, m, n, k, C>& c, CALL_SITE) {
    typedef fragment<matrix_a, m, n, k, T, Left> A;
    typedef fragment<matrix_b, m, n, k, T, Right> B;
    constexpr bool half_sums = wmma_on_cpu::is_half<C> || wmma_on_cpu::is_half<D>;
    static_assert(wmma_on_cpu::is_half<T> || !half_sums, "products of half alone have accumulators of half");
    wmma_on_cpu::Operands<A, B> own;
    for (int i = 0; i < A::num_elements; ++i) own.a[i] = wmma_on_cpu::operand<T>(a.x[i]);
    for (int i = 0; i < B::num_elements; ++i) own.b[i] = wmma_on_cpu::operand<T>(b.x[i]);
    float sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = wmma_on_cpu::number(c.x[i]);
    wmma_on_cpu::multiply_add<A, B>(sums, own, file, line);
    for (int i = 0; i < 8; ++i) d.x[i] = sums[i];
}

}  // namespace wmma
}  // namespace nvcuda

#undef CALL_SITE
