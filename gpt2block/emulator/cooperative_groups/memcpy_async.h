// cg::memcpy_async by the threads of a group, and waits for its copies. Each memcpy_async is a stage of its own.
#pragma once
#include <aligned_size.h>
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#define CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cooperative_groups {

template <typename Group, typename To, typename From, typename Size>
__forceinline__ void memcpy_async(const Group& group, To* to, const From* from, const Size& size, CALL_SITE) {
    cuda_on_cpu_sizes::check(to, from, size, file, line);
    cuda_on_cpu_pipeline::begin_shared(group, to, from, size);
    __pipeline_commit();
}

// The layouts are numbers of elements of `to` and `from`.
template <typename Group, typename T, typename ToLayout, typename FromLayout>
__forceinline__ void memcpy_async(const Group& group, T* to, const ToLayout& capacity, const T* from,
                                  const FromLayout& count) {
    const std::size_t a = capacity, b = count;
    cuda_on_cpu_pipeline::begin_shared(group, to, from, (a < b ? a : b) * sizeof(T));
    __pipeline_commit();
}

template <unsigned LATER, typename Group>
__forceinline__ void wait_prior(const Group& group, CALL_SITE) {
    __pipeline_wait_prior(LATER);
    group.sync(file, line);
}

template <typename Group>
__forceinline__ void wait(const Group& group, CALL_SITE) {
    wait_prior<0>(group, file, line);
}

}  // namespace cooperative_groups

#undef CALL_SITE
