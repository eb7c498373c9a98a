// What scores are multiplied by, so that their softmax has powers of two: log2(e) / sqrt(HS) or, for models that state
// a scale of their own, log2(e) ATT_SCALE.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float score_unit(int size) {
#ifdef ATT_SCALE
    return LOG2_E * ATT_SCALE;
#else
    return LOG2_E / sqrtf((float)size);
#endif
}
