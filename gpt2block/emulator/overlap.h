// Replacement of kernels_cu/lib/overlap.cuh; a launch then reports accesses before the wait. The loader substitutes it
// (STAND_INS).
#pragma once

inline void let_next_start() {}
inline void wait_for_previous() { cuda_on_cpu::wait_for_previous(); }
