// Sliding windows: with ATT_WINDOW above 0, the query at position p sees the keys at p - ATT_WINDOW + 1 .. p only.
//
// Kernels start with the tile of keys that has the first one of these, counted from position 0 as without a window, so
// that the time does not grow with the keys before it.
//
// On an NVIDIA H200, us, float16: attention/decode.cu, one query of 32 heads of 128 channels, 8 of K: at position
// 30,000 with a window of 4,096 39.1, at position 4,096 38.7, at 30,000 without a window 236. attention/hopper.cu,
// 8,192 rows with a window of 512: 32 heads of 128 channels 213 (1,026 without), 12 of 64 channels 73 (230).
#pragma once

#ifndef ATT_WINDOW  // keys that a query sees; 0: all
#define ATT_WINDOW 0
#endif

constexpr int WINDOW = ATT_WINDOW;

// The first key that the query at this position sees.
__device__ __forceinline__ int first_seen(int position) { return WINDOW ? max(position - WINDOW + 1, 0) : 0; }

// Whether the query at this position no longer sees a key.
__device__ __forceinline__ bool is_past(int key, int position) { return WINDOW && key <= position - WINDOW; }
