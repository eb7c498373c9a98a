// Definitions from headers of C and C++, which nvcc includes in every file but NVRTC lacks. The loader puts them before
// a user's file. The emulator's g++ has the headers themselves.
#ifdef __CUDACC_RTC__
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define FLT_MAX 3.402823466e38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define DBL_MAX 1.7976931348623157e308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#define M_PI 3.14159265358979323846
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define M_2_SQRTPI 1.12837916709551257390
#define M_LOG2E 1.44269504088896340736
#define M_LN2 0.69314718055994530942

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

namespace std {
using ::abs, ::fabs, ::fmax, ::fmin, ::fma, ::fmod, ::floor, ::ceil, ::round, ::trunc;
using ::sqrt, ::cbrt, ::pow, ::exp, ::exp2, ::expm1, ::log, ::log2, ::log10, ::log1p;
using ::sin, ::cos, ::tan, ::sinh, ::cosh, ::tanh, ::atan, ::atan2, ::erf, ::isnan, ::isinf, ::isfinite;

template <typename T>
__device__ constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }

template <typename T>
__device__ constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
}  // namespace std
#endif
