// Replacement of kernels_cu/lib/fast.cuh without PTX. The loader substitutes it (STAND_INS).
#pragma once

inline float exp2_fast(float x) { return exp2f(x); }
inline float gelu_fast(float v) { return v / (1.0f + exp2_fast(v * fmaf(-0.10294324f, v * v, -2.3022082f))); }
