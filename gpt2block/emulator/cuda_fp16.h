// float16: __half, __half2 and their functions.
#pragma once

#define NUMBER __half
#define PAIR __half2
#define NAME half
#define BITS_OF cuda_on_cpu::fp16_bits
#define VALUE_OF cuda_on_cpu::fp16_value
#include "low_precision.h"
#undef NUMBER
#undef PAIR
#undef NAME
#undef BITS_OF
#undef VALUE_OF

typedef __half half, __nv_half, nv_half;
typedef __half2 half2, __nv_half2, nv_half2;

#define CUDART_INF_FP16 __ushort_as_half(0x7C00)
#define CUDART_NAN_FP16 __ushort_as_half(0x7FFF)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7BFF)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000)
#define CUDART_ZERO_FP16 __ushort_as_half(0x0000)
#define CUDART_ONE_FP16 __ushort_as_half(0x3C00)
