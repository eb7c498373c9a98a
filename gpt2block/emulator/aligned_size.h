// cuda::aligned_size_t, a size that promises alignment, and its check. Included inside the unnamed namespace of a file.
#pragma once

namespace cuda {

template <std::size_t ALIGNMENT>
struct aligned_size_t {
    static constexpr std::size_t align = ALIGNMENT;
    std::size_t value;
    explicit aligned_size_t(std::size_t size) : value(size) {}
    operator std::size_t() const { return value; }
};

}  // namespace cuda

namespace cuda_on_cpu_sizes {

template <typename Size>
void check(const void*, const void*, const Size&, const char*, int) {}
template <std::size_t ALIGNMENT>
void check(const void* to, const void* from, const cuda::aligned_size_t<ALIGNMENT>& size, const char* file, int line) {
    if (((std::uintptr_t)to | (std::uintptr_t)from | size) % ALIGNMENT == 0) return;
    cuda_on_cpu::stop("memcpy_async: an address or the size is not a multiple of aligned_size_t", file, line);
}

}  // namespace cuda_on_cpu_sizes
