// cuda::std, which is the C++ library, and operators of <cuda/functional>. The loader includes the headers of the C++
// library before the unnamed namespace that contains a kernel file. cuda::std is a namespace of its own and not an
// alias, as it has functions of later versions of C++.
#pragma once

namespace cuda {
namespace std {

using namespace ::std;

template <typename To, typename From>
__forceinline__ To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of the same size");
    return cuda_on_cpu::bits<To>(from);
}

template <typename T>
constexpr int popcount(T x) {
    return __builtin_popcountll(x);
}
template <typename T>
constexpr int countl_zero(T x) {
    return x ? __builtin_clzll(x) - (64 - 8 * (int)sizeof(T)) : 8 * sizeof(T);
}
template <typename T>
constexpr int countr_zero(T x) {
    return x ? __builtin_ctzll(x) : 8 * sizeof(T);
}
template <typename T>
constexpr bool has_single_bit(T x) {
    return x && !(x & (x - 1));
}

}  // namespace std

#define OPERATOR(name, result)                                                              \
    template <typename T = void>                                                            \
    struct name {                                                                           \
        constexpr T operator()(const T& a, const T& b) const { return result; }             \
    };                                                                                      \
    template <>                                                                             \
    struct name<void> {                                                                     \
        template <typename A, typename B>                                                   \
        constexpr ::std::common_type_t<A, B> operator()(const A& a, const B& b) const {     \
            return result;                                                                  \
        }                                                                                   \
    };
OPERATOR(maximum, a < b ? b : a)
OPERATOR(minimum, b < a ? b : a)
#undef OPERATOR

template <typename T, typename U>
constexpr T ceil_div(T a, U b) {
    return (a + b - 1) / b;
}

}  // namespace cuda
