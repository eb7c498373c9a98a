// Mathematical functions that CUDA adds to C's: error function and normal distribution with their inverses, Bessel
// functions, roots, norms. The functions of float are computed in double. Included by cuda_on_cpu.h.
#pragma once

namespace cuda_on_cpu {

constexpr double PI = 3.14159265358979323846, SQRT_PI = 1.77245385090551602730, SQRT_2 = 1.41421356237309504880;

// Solves erf(y) = x for |x| <= 0.5 by Newton's method.
inline double near_erfinv(double x) {
    double y = x * SQRT_PI / 2.0;
    for (int i = 0; i < 6; ++i) y -= (std::erf(y) - x) * std::exp(y * y) * SQRT_PI / 2.0;
    return y;
}

// Returns erfc(x) exp(x^2). If erfc(x) is too small, it is computed from the first terms of the asymptotic series.
inline double erfcx(double x) {
    if (x < 25.0) return std::exp(x * x) * std::erfc(x);
    const double t = 0.5 / (x * x);
    return (1.0 - t * (1.0 - 3.0 * t * (1.0 - 5.0 * t * (1.0 - 7.0 * t)))) / (x * SQRT_PI);
}

// Solves erfc(y) = z for 0 < z <= 0.5 by Newton's method for log(erfc(y)) = log(z), which converges from above.
inline double far_erfcinv(double z) {
    double y = min(std::sqrt(-std::log(z)), 27.2);
    for (int i = 0; i < 6; ++i) y += std::log(std::erfc(y) / z) * erfcx(y) * SQRT_PI / 2.0;
    return y;
}

inline double erfcinv(double z) {
    if (!(z >= 0.0 && z <= 2.0)) return __builtin_nan("");
    if (z == 0.0 || z == 2.0) return std::copysign(__builtin_inf(), 1.0 - z);
    if (z <= 0.5) return far_erfcinv(z);
    return z < 1.5 ? near_erfinv(1.0 - z) : -far_erfcinv(2.0 - z);
}

inline double erfinv(double x) {
    const double size = std::fabs(x);
    return size <= 0.5 ? near_erfinv(x) : std::copysign(erfcinv(1.0 - size), x);
}

}  // namespace cuda_on_cpu

// Defines a function of double, and of float with suffix f. noexcept, as the C library may declare them, too.
#define FUNCTION(name, result)                                  \
    inline double name(double x) noexcept { return result; }    \
    inline float name##f(float number) noexcept {               \
        const double x = number;                                \
        return (float)(result);                                 \
    }
FUNCTION(erfinv, cuda_on_cpu::erfinv(x))
FUNCTION(erfcinv, cuda_on_cpu::erfcinv(x))
FUNCTION(erfcx, cuda_on_cpu::erfcx(x))
FUNCTION(normcdf, 0.5 * std::erfc(-x / cuda_on_cpu::SQRT_2))
FUNCTION(normcdfinv, -cuda_on_cpu::SQRT_2 * cuda_on_cpu::erfcinv(2.0 * x))
FUNCTION(cyl_bessel_i0, cuda_on_cpu::bessel_i(0.0, std::fabs(x)))
FUNCTION(cyl_bessel_i1, std::copysign(cuda_on_cpu::bessel_i(1.0, std::fabs(x)), x))
FUNCTION(sinpi, std::sin(cuda_on_cpu::PI * std::remainder(x, 2.0)))
FUNCTION(cospi, std::cos(cuda_on_cpu::PI * std::remainder(x, 2.0)))
FUNCTION(rcbrt, 1.0 / std::cbrt(x))
#undef FUNCTION

#define NORMS(type, f)                                                                                    \
    inline void sincospi##f(type x, type* s, type* c) noexcept { *s = sinpi##f(x), *c = cospi##f(x); }    \
    __forceinline__ type norm##f(int n, const type* x) { /* inlined, so that a report names the kernel's line */ \
        double squares = 0.0;                                                                             \
        for (int i = 0; i < n; ++i) squares += (double)x[i] * x[i];                                       \
        return (type)std::sqrt(squares);                                                                  \
    }                                                                                                     \
    __forceinline__ type rnorm##f(int n, const type* x) { return 1 / norm##f(n, x); }                     \
    inline type norm3d##f(type x, type y, type z) { return std::hypot(x, y, z); }                         \
    inline type norm4d##f(type x, type y, type z, type w) { return std::hypot(x, std::hypot(y, z, w)); }  \
    inline type rnorm3d##f(type x, type y, type z) { return 1 / norm3d##f(x, y, z); }                     \
    inline type rnorm4d##f(type x, type y, type z, type w) { return 1 / norm4d##f(x, y, z, w); }          \
    inline type rhypot##f(type x, type y) noexcept { return 1 / std::hypot(x, y); }
NORMS(double, )
NORMS(float, f)
#undef NORMS
