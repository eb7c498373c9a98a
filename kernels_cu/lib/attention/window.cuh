// Sliding windows: with ATT_WINDOW above 0, the query at position p sees the keys at p - ATT_WINDOW + 1 .. p only.
//
// Kernels start with the tile that contains the first visible key. Tiles are counted from position 0, as without a
// window. The time of a kernel does not grow with the number of keys before the window.
//
// Measured: docs/experiments.md#attention_split
#pragma once

#ifndef ATT_WINDOW  // keys that a query sees; 0: all keys
#define ATT_WINDOW 0
#endif

constexpr int WINDOW = ATT_WINDOW;

// Returns the position of the first key that the query at `position` sees.
__device__ __forceinline__ int first_seen(int position) { return WINDOW ? max(position - WINDOW + 1, 0) : 0; }

// Returns whether a key precedes the window of the query at `position`.
__device__ __forceinline__ bool is_past(int key, int position) { return WINDOW && key <= position - WINDOW; }
