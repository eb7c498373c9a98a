// kernels_cu/lib/overlap.cuh for the CPU, where a launch reports accesses before the wait. Used through `headers` of a
// Source.
#pragma once

inline void let_next_start() {}
inline void wait_for_previous() { cuda_on_cpu::wait_for_previous(); }
