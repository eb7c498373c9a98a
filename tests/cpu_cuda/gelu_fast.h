// kernels_cu/gelu_fast.cuh on the CPU, without its PTX. For a Source's `headers`.
#pragma once

inline float gelu_fast(float v) { return v / (1.0f + exp2f(v * fmaf(-0.10294324f, v * v, -2.3022082f))); }
