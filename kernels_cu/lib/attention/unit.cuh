// The factor that scales scores so that softmax can use powers of two: log2(e) / sqrt(HS) for heads of HS channels, or
// log2(e) * ATT_SCALE for models that define a scale.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float score_unit(int size) {
#ifdef ATT_SCALE
    return LOG2_E * ATT_SCALE;
#else
    return LOG2_E / sqrtf((float)size);
#endif
}
