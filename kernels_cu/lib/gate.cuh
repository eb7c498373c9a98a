// The gate of a feed-forward: SiLU, gate_of(v) = v / (1 + exp(-v)), or with GATE_GELU the tanh approximation of GELU.
// With GATE_SIGMOID, the gate of attention: 1 / (1 + exp(-v)).
#pragma once

#include "lib/gelu.cuh"

__device__ __forceinline__ float gate_of(float v) {
#ifdef GATE_GELU
    return gelu(v);
#elif defined(GATE_SIGMOID)
    return 1.0f / (1.0f + expf(-v));
#else
    return v / (1.0f + expf(-v));
#endif
}
