// The gate of a feed-forward, gate_of(v) = v / (1 + exp(-v)), SiLU, or with GATE_GELU GELU, in its tanh approximation.
#pragma once

#include "lib/gelu.cuh"

__device__ __forceinline__ float gate_of(float v) {
#ifdef GATE_GELU
    return gelu(v);
#else
    return v / (1.0f + expf(-v));
#endif
}
