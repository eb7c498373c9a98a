// bfloat16: __nv_bfloat16, __nv_bfloat162 and their functions.
#pragma once

#define NUMBER __nv_bfloat16
#define PAIR __nv_bfloat162
#define NAME bfloat16
#define BITS_OF cuda_on_cpu::bf16_bits
#define VALUE_OF cuda_on_cpu::bf16_value
#include "low_precision.h"
#undef NUMBER
#undef PAIR
#undef NAME
#undef BITS_OF
#undef VALUE_OF

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7F80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7FFF)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7F7F)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3F80)
