// What the lanes of a warp have in registers, for instructions that combine it. Included by mma.h and mma_ptx.h.
#pragma once

// For functions that access registers of lanes alone, in which a kernel can make no mistake.
#define UNCHECKED __attribute__((no_sanitize("address", "undefined", "thread")))

// A value of each lane of a warp, which all lanes give at the same time. A lane that has returned gives bytes of 0xFF.
template <typename V>
class OfWarp {
  public:
    UNCHECKED explicit OfWarp(const V& own, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        count_ = ++counts_[thread];
        lanes_ = &given_[count_ % 2][thread / 32 * 32];
        given_[count_ % 2][thread] = {own, count_};
        // All lanes have then read the value before this one; the next one takes its memory.
        cuda_on_cpu::gather(0xffffffffu, 0, file, line);
    }

    UNCHECKED const V& operator[](int lane) const {
        const Given& given = lanes_[lane];
        return given.count == count_ ? given.value : none_;
    }

  private:
    struct Given {
        V value;
        unsigned count;  // of the lane's values so far
    };

    static V none() {
        V value;
        std::memset(&value, 0xFF, sizeof value);
        return value;
    }

    static inline const V none_ = none();
    static inline Given given_[2][1024];
    static inline unsigned counts_[1024];

    unsigned count_;
    const Given* lanes_;
};
